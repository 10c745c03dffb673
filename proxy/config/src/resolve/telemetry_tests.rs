//! Tests the resolution of the collector from files and variables.

use super::*;
use crate::machine::HostMachine;
use crate::problem::ConfigProblems;
use crate::resolve::{ResolvedConfig, resolve_config};
use crate::source::layers::{ConfigSources, load_config};

/// Resolves this `[telemetry]`, a file of headers next to it, and these variables.
fn read(text: &str, file: &str, variables: &[(&str, &str)]) -> Result<ResolvedConfig, String> {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = tempfile::tempdir().unwrap();
    let headers = dir.path().join("headers");
    std::fs::write(&headers, file).unwrap();
    std::fs::set_permissions(&headers, std::fs::Permissions::from_mode(0o600)).unwrap();
    let path = dir.path().join("w.toml");
    std::fs::write(&path, format!("[telemetry]\n{text}\n[remotes.x]\nurl = \"http://127.0.0.1:1\"\n"))
        .unwrap();
    let told = |problems: ConfigProblems| problems.lines().join("\n");
    let loaded = load_config(ConfigSources { file: Some(path), ..ConfigSources::default() }).map_err(told)?;
    let mut machine = HostMachine::read();
    machine.env.retain(|(name, _)| !name.to_string_lossy().starts_with("OTEL_"));
    machine.env.extend(variables.iter().map(|(name, value)| (name.into(), value.into())));
    resolve_config(&loaded, &machine, false).map_err(told)
}

fn collector(text: &str, file: &str, variables: &[(&str, &str)]) -> Option<TraceCollector> {
    let resolved = read(text, file, variables).unwrap();
    assert!(resolved.warnings.is_empty(), "{:?}", resolved.warnings);
    resolved.collector
}

#[test]
fn nothing_is_exported_unasked() {
    assert_eq!(collector("", "", &[]), None);
    assert_eq!(collector("ratio = 0.5\nheaders = \"headers\"", "A: b", &[]), None);
    let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://h:4318");
    assert_eq!(collector("", "", &[endpoint, ("OTEL_SDK_DISABLED", "TRUE")]), None);
    assert_eq!(collector("", "", &[endpoint, ("OTEL_TRACES_EXPORTER", "none")]), None);
}

#[test]
fn a_file_comes_first_and_variables_say_what_it_leaves_open() {
    let variables = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://other:1"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "x-a=1, x-b = two%20words"),
        ("OTEL_SERVICE_NAME", "mine"),
        ("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=lab,service.name=no"),
    ];
    let own = collector(
        "endpoint = \"https://h/otlp/\"\nheaders = \"headers\"",
        "# mine\nAuthorization: Bearer s3cret\n",
        &variables,
    );
    let own = own.unwrap();
    assert_eq!((own.origin.to_string().as_str(), own.path.as_str()), ("https://h", "/otlp/v1/traces"));
    assert_eq!(
        (own.headers.len(), &own.headers["authorization"]),
        (1, &HeaderValue::from_static("Bearer s3cret"))
    );
    assert!(!format!("{own:?}").contains("s3cret"));
    let resource = [("deployment.environment", "lab"), ("service.name", "mine")];
    assert_eq!(own.resource, resource.map(|(key, value)| (key.to_owned(), value.to_owned())));

    let near = [("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318"), variables[1]];
    let theirs = collector("", "", &near).unwrap();
    assert_eq!(
        (theirs.origin.to_string().as_str(), theirs.path.as_str()),
        ("http://127.0.0.1:4318", "/v1/traces")
    );
    assert_eq!(theirs.headers["x-b"], "two words");
    assert_eq!(theirs.resource, [("service.name".to_owned(), "llama-warden".to_owned())]);
    let exact = [near[0], ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://localhost:9/in")];
    assert_eq!(collector("", "", &exact).unwrap().path, "/in");
}

#[test]
fn what_is_wrong_in_the_file_is_an_error_and_in_a_variable_a_warning() {
    for (text, file, words) in [
        ("endpoint = \"localhost:4318\"", "", "http://"),
        ("endpoint = \"http://u:p@h\"", "", "user"),
        ("endpoint = \"http://h/?a=1\"", "", "`?`"),
        ("endpoint = \"http://h\"\nheaders = \"nowhere\"", "", "cannot be read"),
        ("endpoint = \"http://127.0.0.1\"\nheaders = \"headers\"", "s3cret", "line 1"),
        ("endpoint = \"http://127.0.0.1\"\nheaders = \"headers\"", "\nContent-Length: 9", "line 2"),
        ("ratio = 1.5", "", "ratio"),
    ] {
        let told = read(text, file, &[]).unwrap_err();
        assert!(told.contains(words) && !told.contains("s3cret"), "{text}: {told}");
    }
    for variables in [
        &[("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317")][..],
        &[("OTEL_EXPORTER_OTLP_ENDPOINT", "http://h:4317"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")],
    ] {
        let resolved = read("", "", variables).unwrap();
        assert!(resolved.collector.is_none() && resolved.warnings.len() == 1, "{:?}", resolved.warnings);
    }
    let headers =
        [("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1"), ("OTEL_EXPORTER_OTLP_HEADERS", "a b=c,d=e")];
    let resolved = read("", "", &headers).unwrap();
    assert_eq!((resolved.warnings.len(), resolved.collector.unwrap().headers.len()), (1, 1));
    let far = read("endpoint = \"http://h\"\nheaders = \"headers\"", "a: b", &[]).unwrap();
    assert!(far.warnings.len() == 1 && far.collector.is_some(), "{:?}", far.warnings);
}
