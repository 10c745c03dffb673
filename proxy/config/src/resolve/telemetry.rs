//! Resolves the collector for traces of requests, from `[telemetry]` or else from OpenTelemetry's standard
//! variables.

use std::path::Path;

use http::header::{HeaderName, HeaderValue};
use http::{HeaderMap, Uri};
use warden_gateway::percent_decoded;
use warden_policies::{defaults, secrets};
use warden_supervisor::RemoteOrigin;

use super::remotes::is_open_to_all;
use super::resolver::ConfigResolver;
use crate::machine::HostMachine;

/// Maximum size in bytes of a file with headers; a larger file is likely something else.
const MAX_HEADERS_BYTES: u64 = 64 << 10;

const TRACES_PATH: &str = "/v1/traces";

const DEFAULT_SERVICE_NAME: &str = "llama-warden";

const ENDPOINT_HINT: &str = "write it like `http://127.0.0.1:4318`";

/// An OpenTelemetry collector.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceCollector {
    /// Address of the collector.
    pub origin: RemoteOrigin,
    /// Complete path for traces.
    pub path: String,
    /// Additional headers; their values are secrets.
    pub headers: HeaderMap,
    /// Resource attributes: `service.name` and others.
    pub resource: Vec<(String, String)>,
    /// Intervals, sizes and limits.
    pub numbers: defaults::Telemetry,
}

impl ConfigResolver<'_> {
    pub(super) fn resolve_collector(&mut self) -> Option<TraceCollector> {
        let numbers = self.loaded.settings.telemetry.clone();
        let variables = OtelVariables(self.machine);
        let written = &numbers.endpoint;
        let (origin, path) = if written.is_empty() {
            // Report unusable variables as warnings, because they may be meant for other programs.
            variables.endpoint().unwrap_or_else(|(message, hint)| {
                self.warn(&["telemetry"], message, hint);
                None
            })?
        } else {
            match parse_endpoint(written, true) {
                Ok(found) => found,
                Err(why) => {
                    let message = format!("`telemetry.endpoint`: `{}`: {why}", secrets::redact_text(written));
                    self.report(&["telemetry", "endpoint"], message, ENDPOINT_HINT);
                    return None;
                }
            }
        };
        let headers = if let Some(file) = self.resolve_file(&numbers.headers) {
            self.read_headers(&file)?
        } else {
            let (headers, bad) = variables.headers();
            if bad > 0 {
                let message =
                    format!("variables of OpenTelemetry have {bad} headers that are none: they are left out");
                self.warn(&["telemetry"], message, "write them like `name=value,name=value`");
            }
            headers
        };
        if !headers.is_empty() && !origin.is_encrypted() && !origin.is_local() {
            let message = "`telemetry`: the collector's headers go over the network unencrypted";
            self.warn(&["telemetry", "headers"], message, "use an `https://` endpoint");
        }
        Some(TraceCollector { origin, path, headers, resource: variables.resource_attributes(), numbers })
    }

    /// Reads the file with headers. If it is unusable, reports that and returns `None`.
    fn read_headers(&mut self, file: &Path) -> Option<HeaderMap> {
        let key = ["telemetry", "headers"];
        let read = || {
            let about = std::fs::metadata(file).map_err(|error| format!("cannot be read: {error}"))?;
            if !about.is_file() || about.len() > MAX_HEADERS_BYTES {
                return Err("is no small file".to_owned());
            }
            let text = std::fs::read_to_string(file).map_err(|error| format!("cannot be read: {error}"))?;
            parse_headers(&text)
        };
        let headers = read();
        if let Err(why) = &headers {
            let message = format!("`telemetry.headers`: {} {why}", file.display());
            self.report(&key, message, "write one header on a line, like `Authorization: Bearer …`");
        } else if is_open_to_all(file) {
            let message =
                format!("`telemetry.headers`: every user of this machine can read {}", file.display());
            self.warn(&key, message, "`chmod 600` it");
        }
        headers.ok()
    }
}

/// OpenTelemetry's standard variables.
struct OtelVariables<'a>(&'a HostMachine);

impl OtelVariables<'_> {
    fn get(&self, name: &str) -> Option<String> {
        self.0.var(name).and_then(|value| value.to_str()).map(|value| value.trim().to_owned())
    }

    /// Returns the OTLP variable for traces, else the one for all kinds of telemetry.
    fn get_otlp(&self, rest: &str) -> Option<String> {
        let of_traces = self.get(&format!("OTEL_EXPORTER_OTLP_TRACES_{rest}"));
        of_traces.or_else(|| self.get(&format!("OTEL_EXPORTER_OTLP_{rest}")))
    }

    /// Returns the endpoint that the variables name. The error is a message and a hint.
    fn endpoint(&self) -> Result<Option<(RemoteOrigin, String)>, (String, &'static str)> {
        let of_traces = self.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT");
        let is_for_all = of_traces.is_none();
        let Some(written) = of_traces.or_else(|| self.get("OTEL_EXPORTER_OTLP_ENDPOINT")) else {
            return Ok(None);
        };
        let is_off = self.get("OTEL_SDK_DISABLED").is_some_and(|is| is.eq_ignore_ascii_case("true"));
        if is_off || self.get("OTEL_TRACES_EXPORTER").as_deref() == Some("none") {
            return Ok(None);
        }
        if let Some(protocol) = self.get_otlp("PROTOCOL").filter(|protocol| protocol != "http/protobuf") {
            let message = format!(
                "variables of OpenTelemetry ask for the protocol `{protocol}`: no traces are exported"
            );
            let hint = "OTLP is spoken as `http/protobuf`: name such an endpoint in `telemetry.endpoint`";
            return Err((message, hint));
        }
        parse_endpoint(&written, is_for_all).map(Some).map_err(|why| {
            let message = format!(
                "variables of OpenTelemetry name the endpoint `{}`: {why}; no traces are exported",
                secrets::redact_text(&written)
            );
            (message, ENDPOINT_HINT)
        })
    }

    /// Returns the headers, and the number of unusable ones.
    fn headers(&self) -> (HeaderMap, usize) {
        let mut all = HeaderMap::new();
        let mut bad = 0;
        for (name, value) in parse_pairs(&self.get_otlp("HEADERS").unwrap_or_default()) {
            match parse_header(&name, &value) {
                Some((name, value)) => drop(all.insert(name, value)),
                None => bad += 1,
            }
        }
        (all, bad)
    }

    /// Returns the resource attributes from OpenTelemetry's variables. `OTEL_SERVICE_NAME` overrides
    /// `service.name` in `OTEL_RESOURCE_ATTRIBUTES`; without either, the default name is used.
    fn resource_attributes(&self) -> Vec<(String, String)> {
        let mut all = parse_pairs(&self.get("OTEL_RESOURCE_ATTRIBUTES").unwrap_or_default());
        if let Some(name) = self.get("OTEL_SERVICE_NAME") {
            all.retain(|(key, _)| key != "service.name");
            all.push(("service.name".to_owned(), name));
        }
        if !all.iter().any(|(key, _)| key == "service.name") {
            all.push(("service.name".to_owned(), DEFAULT_SERVICE_NAME.to_owned()));
        }
        all
    }
}

/// Parses an endpoint. `adds`: it is for all kinds of telemetry, so the path for traces is added.
fn parse_endpoint(text: &str, adds: bool) -> Result<(RemoteOrigin, String), String> {
    let uri: Uri = text.parse().map_err(|error| format!("it is no address: {error}"))?;
    if uri.query().is_some() {
        return Err("it has a `?` in it".to_owned());
    }
    let (Some(scheme), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
        return Err("it begins neither with `https://` nor with `http://`".to_owned());
    };
    let origin = RemoteOrigin::parse(&format!("{scheme}://{authority}"), None)?;
    let path = match (adds, uri.path()) {
        (true, path) => format!("{}{TRACES_PATH}", path.trim_end_matches('/')),
        (false, path) => path.to_owned(),
    };
    Ok((origin, path))
}

/// Parses lines of the form `Name: value`. Empty lines and lines that begin with `#` are skipped.
fn parse_headers(text: &str) -> Result<HeaderMap, String> {
    let mut all = HeaderMap::new();
    for (at, line) in text.lines().enumerate() {
        if line.trim().is_empty() || line.starts_with('#') {
            continue;
        }
        // Do not quote the line, which may be a secret.
        let read = line.split_once(':').and_then(|(name, value)| parse_header(name.trim(), value.trim()));
        let (name, value) = read.ok_or_else(|| format!("has no header in line {}", at + 1))?;
        all.insert(name, value);
    }
    Ok(all)
}

fn parse_header(name: &str, value: &str) -> Option<(HeaderName, HeaderValue)> {
    let name: HeaderName = name.parse().ok()?;
    // Refuse headers that describe the connection or the body, because the exporter sets them.
    if ["host", "content-length", "content-type", "transfer-encoding", "connection"].contains(&name.as_str())
    {
        return None;
    }
    let mut value = HeaderValue::from_str(value).ok()?;
    value.set_sensitive(true);
    Some((name, value))
}

/// Parses `key=value,key=value` with percent-encoded values.
fn parse_pairs(text: &str) -> Vec<(String, String)> {
    let all = text.split(',').filter_map(|pair| pair.split_once('='));
    all.map(|(key, value)| {
        let value = value.trim();
        (key.trim().to_owned(), percent_decoded(value).unwrap_or_else(|| value.to_owned()))
    })
    .filter(|(key, _)| !key.is_empty())
    .collect()
}

#[cfg(test)]
#[path = "telemetry_tests.rs"]
mod tests;
