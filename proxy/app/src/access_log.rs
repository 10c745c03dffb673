//! One line for each request: as a part of our log, or in a file of its own. It has names, numbers and addresses; never a
//! prompt, an answer or a key.
//!
//! ```text
//!   log.access = ""       record -> tracing, target `access` -> standard error     (`log.level` decides, `access=off`)
//!   log.access = "FILE"   record -> line -> [bounded queue] -> thread -> FILE      (whatever `log.level` says)
//! ```
//!
//! SIGHUP opens the file anew, for whoever has renamed it.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::Version;
use serde::Serialize;
use warden_gateway::Record;
use warden_policies::ModelName;
use warden_policies::defaults::Log;

use crate::clock;
use crate::exit::Failure;
use crate::log_writer::LogWriter;

/// The lines hold addresses of clients: not for everybody.
const MODE: u32 = 0o640;
/// At the end of the process: longer than any disk needs.
const FLUSH: Duration = Duration::from_secs(1);

/// Where the lines go. Cheap to clone.
#[derive(Clone)]
pub(crate) struct AccessLog(Option<Arc<OwnFile>>);

struct OwnFile {
    path: PathBuf,
    json: bool,
    file: Shared,
    writer: LogWriter,
}

#[derive(Clone)]
struct Shared(Arc<Mutex<BufWriter<File>>>);

impl Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).flush()
    }
}

fn open(path: &Path) -> io::Result<BufWriter<File>> {
    OpenOptions::new().create(true).append(true).mode(MODE).open(path).map(BufWriter::new)
}

impl AccessLog {
    /// A file of its own, or none.
    pub(crate) fn start(path: Option<&Path>, log: &Log) -> Result<Self, Failure> {
        let Some(path) = path else { return Ok(Self(None)) };
        let failed = |error: io::Error| {
            Failure::hinted(
                format!("cannot open the access log {}: {error}", path.display()),
                "name a file in a directory that exists and that we may write to (`log.access`)",
            )
        };
        let file = Shared(Arc::new(Mutex::new(open(path).map_err(failed)?)));
        let writer = LogWriter::start(log.buffered_lines, file.clone()).map_err(failed)?;
        Ok(Self(Some(Arc::new(OwnFile { path: path.to_owned(), json: log.format == "json", file, writer }))))
    }

    /// Opens the file anew. If that fails, the old one goes on.
    pub(crate) fn reopen(&self) {
        let Some(own) = &self.0 else { return };
        own.writer.flush(FLUSH);
        match open(&own.path) {
            Ok(file) => *own.file.0.lock().unwrap_or_else(PoisonError::into_inner) = file,
            Err(error) => {
                tracing::error!(%error, path = %own.path.display(), "cannot open the access log anew; the old file goes on");
            }
        }
    }

    /// Waits until everything is written.
    pub(crate) fn flush(&self) {
        if let Some(own) = &self.0 {
            own.writer.flush(FLUSH);
        }
    }

    /// A request has ended.
    pub(crate) fn write(&self, record: &Record) {
        let line = Line::of(record);
        match &self.0 {
            None => line.trace(),
            Some(own) => {
                let now = clock::now_exact_text();
                let text = if own.json { line.json(&now) } else { line.text(&now) };
                // It cannot fail: the queue takes it, or counts it as lost.
                drop(own.writer.clone().write_all(&text));
            }
        }
    }
}

/// What a line says.
#[derive(Serialize)]
struct Line<'a> {
    id: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    generation: Option<u64>,
    method: &'a str,
    route: &'a str,
    protocol: &'static str,
    status: u16,
    outcome: &'static str,
    stream: bool,
    queue_ms: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    ttfb_ms: Option<f64>,
    total_ms: f64,
    prompt_tokens: u64,
    output_tokens: u64,
    bytes_in: u64,
    bytes_out: u64,
    retries: u32,
    peer: std::net::IpAddr,
}

/// Whole microseconds: more digits are noise.
fn ms(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

fn protocol(version: Version) -> &'static str {
    match version {
        Version::HTTP_10 => "http/1.0",
        Version::HTTP_2 => "h2",
        _ => "http/1.1",
    }
}

impl<'a> Line<'a> {
    fn of(record: &'a Record) -> Self {
        Self {
            id: &record.request_id,
            key: record.key.as_deref(),
            model: record.model.as_ref().map(ModelName::as_str),
            generation: record.generation.map(|generation| generation.0),
            method: record.method.as_str(),
            route: record.route,
            protocol: protocol(record.protocol),
            status: record.status,
            outcome: record.outcome.as_str(),
            stream: record.stream,
            queue_ms: ms(record.queued),
            ttfb_ms: record.first_byte.map(ms),
            total_ms: ms(record.total),
            prompt_tokens: record.work.prompt_tokens,
            output_tokens: record.work.output_tokens,
            bytes_in: record.bytes_in,
            bytes_out: record.bytes_out,
            retries: record.retries,
            peer: record.peer,
        }
    }

    fn trace(&self) {
        tracing::info!(
            target: "access",
            id = self.id,
            key = self.key,
            model = self.model.map(tracing::field::display),
            generation = self.generation,
            method = self.method,
            route = self.route,
            protocol = self.protocol,
            status = self.status,
            outcome = self.outcome,
            stream = self.stream,
            queue_ms = self.queue_ms,
            ttfb_ms = self.ttfb_ms,
            total_ms = self.total_ms,
            prompt_tokens = self.prompt_tokens,
            output_tokens = self.output_tokens,
            bytes_in = self.bytes_in,
            bytes_out = self.bytes_out,
            retries = self.retries,
            peer = %self.peer,
        );
    }

    /// As the log has it, without a level: all lines are of one kind.
    fn text(&self, now: &str) -> Vec<u8> {
        let mut out = Vec::with_capacity(400);
        // Writing to memory does not fail.
        let _whole = self.write_text(now, &mut out);
        out
    }

    fn write_text(&self, now: &str, out: &mut Vec<u8>) -> io::Result<()> {
        write!(out, "{now} access: id={:?}", self.id)?;
        if let Some(key) = self.key {
            write!(out, " key={key:?}")?;
        }
        if let Some(model) = self.model {
            write!(out, " model={model:?}")?;
        }
        if let Some(generation) = self.generation {
            write!(out, " generation={generation}")?;
        }
        write!(
            out,
            " method={} route={} protocol={} status={} outcome={} stream={} queue_ms={}",
            self.method, self.route, self.protocol, self.status, self.outcome, self.stream, self.queue_ms
        )?;
        if let Some(ttfb) = self.ttfb_ms {
            write!(out, " ttfb_ms={ttfb}")?;
        }
        writeln!(
            out,
            " total_ms={} prompt_tokens={} output_tokens={} bytes_in={} bytes_out={} retries={} peer={}",
            self.total_ms,
            self.prompt_tokens,
            self.output_tokens,
            self.bytes_in,
            self.bytes_out,
            self.retries,
            self.peer
        )
    }

    fn json(&self, now: &str) -> Vec<u8> {
        #[derive(Serialize)]
        struct Stamped<'a> {
            timestamp: &'a str,
            #[serde(flatten)]
            line: &'a Line<'a>,
            target: &'static str,
        }
        let mut out = Vec::with_capacity(500);
        // Text and numbers always have a spelling.
        let _whole =
            serde_json::to_writer(&mut out, &Stamped { timestamp: now, line: self, target: "access" });
        out.push(b'\n');
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use warden_gateway::Outcome;
    use warden_policies::{GenerationId, Work};

    const NOW: &str = "2026-01-02T03:04:05.000006Z";

    fn record() -> Record {
        Record {
            request_id: "r\"1".into(),
            peer: [127, 0, 0, 1].into(),
            method: http::Method::POST,
            protocol: Version::HTTP_2,
            key: Some("alice".into()),
            route: "chat",
            model: Some(ModelName::new("a model")),
            generation: Some(GenerationId(3)),
            status: 200,
            outcome: Outcome::Ok,
            stream: true,
            queued: Duration::from_micros(1500),
            first_byte: Some(Duration::from_millis(20)),
            total: Duration::from_nanos(30_000_400),
            bytes_in: 5,
            bytes_out: 6,
            work: Work { prompt_tokens: 7, output_tokens: 8, ..Work::default() },
            retries: 1,
        }
    }

    #[test]
    fn a_line_is_text_or_json_with_the_same_fields() {
        let record = record();
        let text = String::from_utf8(Line::of(&record).text(NOW)).unwrap();
        assert_eq!(
            text,
            "2026-01-02T03:04:05.000006Z access: id=\"r\\\"1\" key=\"alice\" model=\"a model\" generation=3 method=POST \
             route=chat protocol=h2 status=200 outcome=ok stream=true queue_ms=1.5 ttfb_ms=20 total_ms=30 \
             prompt_tokens=7 output_tokens=8 bytes_in=5 bytes_out=6 retries=1 peer=127.0.0.1\n"
        );
        let json: serde_json::Value = serde_json::from_slice(&Line::of(&record).json(NOW)).unwrap();
        let fields: Vec<&str> =
            text.split(' ').filter_map(|word| word.split_once('=')).map(|one| one.0).collect();
        for field in fields {
            assert!(!json[field].is_null(), "{field} is missing in {json}");
        }
        assert_eq!(
            (&json["key"], &json["total_ms"], &json["target"]),
            (&"alice".into(), &30.0.into(), &"access".into())
        );
        let unknown = Record { key: None, model: None, generation: None, first_byte: None, ..record };
        let json: serde_json::Value = serde_json::from_slice(&Line::of(&unknown).json(NOW)).unwrap();
        assert!(json.get("key").is_none() && json.get("ttfb_ms").is_none(), "{json}");
    }

    #[test]
    fn a_file_of_its_own_is_private_and_opened_anew_after_a_rename() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("access.log");
        let log = warden_policies::defaults().log.clone();
        let access = AccessLog::start(Some(&path), &log).unwrap();
        access.write(&record());
        access.flush();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777 & !MODE, 0);
        let renamed = dir.path().join("access.log.1");
        std::fs::rename(&path, &renamed).unwrap();
        access.reopen();
        access.write(&record());
        access.write(&record());
        access.flush();
        let lines = |path: &Path| std::fs::read_to_string(path).unwrap().lines().count();
        assert_eq!((lines(&renamed), lines(&path)), (1, 2));
        let nowhere = dir.path().join("no/access.log");
        let error = AccessLog::start(Some(&nowhere), &log).map(drop).unwrap_err();
        assert!(error.to_string().contains("no/access.log"), "{error}");
    }
}
