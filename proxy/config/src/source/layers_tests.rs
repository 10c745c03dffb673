//! Tests the priority of layers, and the reports about faults in one.

use super::*;
use std::time::Duration;

fn path(dotted: &str) -> Vec<String> {
    dotted.split('.').map(str::to_owned).collect()
}

fn file(text: &str) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("warden.toml");
    std::fs::write(&path, text).unwrap();
    (dir, path)
}

#[test]
fn with_no_source_everything_is_the_compiled_in_default() {
    let loaded = load_config(ConfigSources::default()).unwrap();
    assert_eq!(loaded.settings.server.port, 8080);
    assert_eq!(loaded.defaults.queue.depth, 512);
    assert_eq!(loaded.defaults.run.replicas, 1);
    assert_eq!(loaded.defaults.policy.common.max_futile, 3);
    assert_eq!(loaded.place(&path("server.port")), ConfigPlace::Default);
    assert!(loaded.models.is_empty());
}

#[test]
fn flags_come_over_the_environment_over_the_file_over_the_defaults() {
    let (_dir, file) = file("[server]\nport = 1\nhost = \"0.0.0.0\"\nconnections = 7\n");
    let loaded = load_config(ConfigSources {
        file: Some(file.clone()),
        env: vec![
            ("LLAMA_WARDEN_SERVER__PORT".into(), "2".into()),
            ("LLAMA_WARDEN_SERVER__HOST".into(), "::1".into()),
            ("LLAMA_WARDEN_CONFIG".into(), "x".into()),
            ("HOME".into(), "/".into()),
        ],
        flags: vec![FlagSetting::raw("--port", &["server", "port"], "3")],
        ..ConfigSources::default()
    })
    .unwrap();
    assert_eq!(loaded.settings.server.port, 3);
    assert_eq!(loaded.place(&path("server.port")), ConfigPlace::Flag("flag --port".into()));
    assert_eq!(loaded.settings.server.host, "::1");
    assert_eq!(loaded.place(&path("server.host")), ConfigPlace::Env("LLAMA_WARDEN_SERVER__HOST".into()));
    assert_eq!(loaded.settings.server.connections, 7);
    assert_eq!(
        loaded.place(&path("server.connections")),
        ConfigPlace::File { path: file.as_path().into(), line: 4 }
    );
}

#[test]
fn a_model_has_its_own_values_over_those_for_all_models() {
    let (_dir, file) = file(
        "[defaults]\nargs = [\"-c\", \"1\"]\nbinary = \"a\"\nenv = { A = \"1\", B = \"1\" }\nqueue.depth = 9\n\
         [models.\"z.1\"]\nenv = { B = \"2\" }\npolicy.max_age = \"1h\"\n\
         [models.a]\nargs = [\"-t\", \"1\"]\nbuild = \"b\"\nqueue.wait = \"3s\"\n",
    );
    let loaded = load_config(ConfigSources { file: Some(file.clone()), ..ConfigSources::default() }).unwrap();
    let names: Vec<&str> = loaded.models.iter().map(|(name, ..)| name.as_str()).collect();
    assert_eq!(names, ["z.1", "a"], "in the order of the file");
    let (z, a) = (&loaded.models[0].1, &loaded.models[1].1);
    assert_eq!(z.args, ["-c", "1"]);
    assert_eq!((z.env["A"].as_str(), z.env["B"].as_str()), ("1", "2"));
    assert_eq!((z.queue.depth, z.queue.wait), (9, Duration::from_secs(300)));
    assert_eq!(z.policy.max_age, Some(Duration::from_secs(3600)));
    assert_eq!(a.args, ["-t", "1"]);
    assert_eq!((a.queue.depth, a.queue.wait), (9, Duration::from_secs(3)));
    assert_eq!((a.binary.as_ref(), a.build.as_deref()), (None, Some("b")));
    let depth: Vec<String> = ["models", "z.1", "queue", "depth"].map(str::to_owned).into();
    assert_eq!(loaded.place(&depth), ConfigPlace::File { path: file.as_path().into(), line: 5 });
}

#[test]
fn what_is_wrong_in_the_environment_names_the_variable() {
    let error = load_config(ConfigSources {
        env: vec![
            ("LLAMA_WARDEN_SERVER__PROT".into(), "2".into()),
            ("LLAMA_WARDEN_QUEUE__WAIT".into(), "soon".into()),
            ("LLAMA_WARDEN_SERVER__PORT".into(), "many".into()),
            ("LLAMA_WARDEN_SERVER__TLS_HANDSHAKE_TIMEOUT".into(), "1s".into()),
        ],
        ..ConfigSources::default()
    })
    .unwrap_err();
    insta::assert_snapshot!(error.lines().join("\n"));
}

#[test]
fn names_in_variables_stay_what_they_are() {
    let (_dir, file) = file("[models.Qwen3]\nmodel = \"a.gguf\"\n");
    let variables = |all: &[(&str, &str)]| ConfigSources {
        file: Some(file.clone()),
        env: all
            .iter()
            .map(|(name, value)| (format!("{}{name}", variables::ENV_PREFIX), (*value).to_owned()))
            .collect(),
        ..ConfigSources::default()
    };
    let loaded = load_config(variables(&[
        ("DEFAULTS__ENV__GGML_CUDA_DISABLE_GRAPHS", "1"),
        ("MODELS__QWEN3__REPLICAS", "2"),
        ("MODELS__Other__MODEL", "b.gguf"),
        ("MODELS__Other__REPLICAS", "3"),
    ]))
    .unwrap();
    let told: Vec<_> =
        loaded.models.iter().map(|(name, model)| (name.as_str(), model.run.replicas)).collect();
    assert_eq!(told, [("Qwen3", 2), ("Other", 3)]);
    assert_eq!(loaded.models[0].1.env["GGML_CUDA_DISABLE_GRAPHS"], "1");
    let wrong = load_config(variables(&[("MODELS__QWEN__REPLICAS", "2"), ("MODELS__zzz__PRELOAD", "true")]))
        .unwrap_err();
    insta::assert_snapshot!(wrong.lines().join("\n"));
}

#[test]
fn a_file_that_is_not_toml_is_an_error_with_its_line() {
    let (_dir, file) = file("[server]\nport = = 1\n");
    let error =
        load_config(ConfigSources { file: Some(file), ..ConfigSources::default() }).unwrap_err().to_string();
    assert!(error.contains("warden.toml:2: this is not TOML"), "{error}");
    let error = load_config(ConfigSources { file: Some("/no/such".into()), ..ConfigSources::default() })
        .unwrap_err()
        .to_string();
    assert!(error.starts_with("/no/such: the configuration file cannot be read"), "{error}");
}
