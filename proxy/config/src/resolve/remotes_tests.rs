//! Tests the resolution of remote models.

use crate::problem::ConfigProblems;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;

use crate::machine::HostMachine;
use crate::resolve::{ResolvedConfig, resolve_config};
use crate::source::layers::{ConfigSources, load_config};

fn read(text: &str, mode: u32) -> Result<ResolvedConfig, String> {
    let dir = tempfile::tempdir().unwrap();
    let key = dir.path().join("key");
    std::fs::write(&key, "s3cret\n").unwrap();
    std::fs::set_permissions(&key, Permissions::from_mode(mode)).unwrap();
    let file = dir.path().join("w.toml");
    std::fs::write(&file, text).unwrap();
    let told = |problems: ConfigProblems| problems.lines().join("\n");
    let loaded = load_config(ConfigSources { file: Some(file), ..ConfigSources::default() }).map_err(told)?;
    resolve_config(&loaded, &HostMachine::read(), false).map_err(told)
}

#[test]
fn a_model_of_an_endpoint_has_rules_of_its_own_and_those_of_names() {
    let resolved = read(
        "[defaults]\nqueue.wait = \"7s\"\n[remotes.cloud]\nurl = \"https://host/v1\"\nmodel = \"far\"\ntimeout = \"90s\"\n\
         request.max_tokens = 10\n[names.best]\nmodels = [\"cloud\"]\nrequest.set = { seed = 1 }\n",
        0o600,
    )
    .unwrap();
    let ([spec], [rules]) = (&resolved.fleet.remotes[..], &resolved.gateway.remotes[..]) else {
        panic!("one")
    };
    assert_eq!((spec.queue.wait.as_secs(), spec.max_in_flight), (7, 64));
    assert_eq!((rules.upstream_model.as_deref(), rules.request.max_tokens), (Some("far"), Some(10)));
    let (_, of_name) = &resolved.gateway.by_name["best"].models[0];
    assert_eq!((of_name.upstream_model.as_deref(), of_name.timeout), (Some("far"), rules.timeout));
    assert!(of_name.request.max_tokens == Some(10) && of_name.request.set.len() == 1);
    assert!(resolved.fleet.models.is_empty() && resolved.warnings.is_empty());
}

#[test]
fn a_key_that_others_can_read_is_told_and_never_shown() {
    let with = |url: &str| format!("[remotes.x]\nurl = \"{url}\"\nkey_file = \"key\"\n");
    for (url, mode, warnings) in [
        ("https://host", 0o600, 0),
        ("https://host", 0o644, 1),
        ("http://host", 0o600, 1),
        ("http://127.0.0.1:8080", 0o600, 0),
        ("http://localhost", 0o600, 0),
    ] {
        let resolved = read(&with(url), mode).unwrap();
        assert_eq!(resolved.warnings.len(), warnings, "{url}: {:?}", resolved.warnings);
        assert!(resolved.fleet.remotes[0].origin.has_key());
        assert!(!format!("{:?}", resolved.fleet).contains("s3cret"));
    }
}
