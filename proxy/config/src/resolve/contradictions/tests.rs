//! Tests each rule with a configuration that violates it, and the numbers in its message.

use crate::machine::HostMachine;
use crate::resolve::resolve_config;
use crate::source::layers::{ConfigSources, load_config};
use warden_policies::ByteSize;

/// Reports on a configuration on a machine with 16 GiB: problems first, then warnings, each with its hint.
fn told(text: &str) -> Vec<String> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("m.gguf"), "").unwrap();
    let file = dir.path().join("w.toml");
    std::fs::write(&file, text).unwrap();
    let loaded = load_config(ConfigSources { file: Some(file), ..ConfigSources::default() }).unwrap();
    let mut machine = HostMachine::read();
    machine.env.clear();
    machine.memory = ByteSize(16 << 30);
    let found = match resolve_config(&loaded, &machine, false) {
        Ok(resolved) => resolved.warnings,
        Err(problems) => problems.0,
    };
    let line = |place: &str| place.rsplit('/').next().unwrap_or_default().to_owned();
    found
        .iter()
        .map(|one| {
            let place = line(&one.place.to_string());
            format!("{place}: {} | {}", one.message, one.hint.clone().unwrap_or_default())
        })
        .collect()
}

/// Configuration of a model `a`, whose cache is below any budget here.
fn model(keys: &str) -> String {
    format!("[models.a]\nmodel = \"m.gguf\"\nargs = [\"--cache-ram\", \"0\", \"-np\", \"4\"]\n{keys}\n")
}

fn only(text: &str) -> String {
    let told = told(text);
    assert_eq!(told.len(), 1, "{told:#?}");
    told.into_iter().next().unwrap_or_default()
}

#[test]
fn defaults_and_sound_settings_contradict_nothing() {
    for text in [
        model(""),
        model(
            "policy.host = { soft = \"4GiB\", hard = \"80%\" }\npolicy.vram.hard = \"95%\"\npolicy.max_age = \"24h\"\npolicy.only = \"02:00-05:00\"",
        ),
        model(
            "policy.host = { soft = \"auto\", hard = \"auto\" }\nmax_in_flight = 2\npolicy.only = \"00:00-24:00\"",
        ),
        "[models.a]\nmodel = \"m.gguf\"\npolicy.host.soft = \"10GiB\"\n".to_owned(),
    ] {
        assert_eq!(told(&text), [""; 0], "{text}");
    }
}

#[test]
fn each_contradiction_is_told_with_its_place_its_numbers_and_a_cure() {
    let mut all = String::new();
    for (text, place) in [
        (model("policy.host = { soft = \"8GiB\", hard = \"4GiB\" }"), "w.toml:4"),
        (format!("{}[shared.vram]\nsoft = \"90%\"\nhard = \"80%\"\n", model("")), "w.toml:7"),
        (model("policy.vram.hard = 12"), "w.toml:4"),
        (format!("{}[shared.host]\nhard = \"5KiB\"\n", model("")), "w.toml:6"),
        (model("policy.host.hard = \"64GiB\""), "w.toml:4"),
        (
            "[models.a]\nmodel = \"m.gguf\"\nargs = [\"-np\", \"2\", \"--ctx-checkpoints\", \"8\", \"-cram\", \"8192\"]\npolicy.host.soft = \"4GiB\"\n".to_owned(),
            "w.toml:4",
        ),
        (
            "[models.a]\nmodel = \"m.gguf\"\nenv.LLAMA_ARG_CACHE_RAM = \"-1\"\npolicy.host.hard = \"4GiB\"\n".to_owned(),
            "w.toml:4",
        ),
        (
            format!("[internal.growth]\nkept = 10\nwindow = 20\n{}", model("")),
            "w.toml:2",
        ),
        (
            format!("[server]\nconnections = 6\nconnections_per_peer = 6\n{}", model("replicas = 2\nqueue.depth = 1")),
            "w.toml:2",
        ),
        (format!("[server]\nconnections = 100\nconnections_per_peer = 200\n{}", model("queue.depth = 9")), "w.toml:3"),
        (model("queue.depth = 5000"), "w.toml:4"),
        (model("max_in_flight = 6"), "w.toml:4"),
        (format!("[server]\nbody_bytes = \"512MiB\"\n{}", model("")), "w.toml:2"),
        (format!("[upstream]\nexchange_timeout = \"200s\"\n{}", model("queue.wait = \"5m\"")), "w.toml:6"),
        (
            format!("[upstream]\nexchange_timeout = \"200s\"\n{}", model("queue.wait = \"9s\"")),
            "default",
        ),
        (model("lifecycle.suspect_timeout = \"5s\""), "w.toml:4"),
        (model("lifecycle.start_timeout = \"20ms\"\nlifecycle.probe_timeout = \"5ms\""), "w.toml:4"),
        (model("lifecycle.start_timeout = \"5s\""), "w.toml:4"),
        (
            model("policy.host.soft = \"8GiB\"\n[shared.host]\nsoft = \"40%\""),
            "w.toml:4",
        ),
        (
            model("policy.vram.hard = \"90%\"\n[shared.vram]\nhard = \"80%\""),
            "w.toml:4",
        ),
        (
            format!("{}[models.b]\nmodel = \"m.gguf\"\ngroups = [\"large\"]\n[models.c]\nmodel = \"m.gguf\"\ngroups = [\"large\"]\n", model("groups = [\"larg\"]")),
            "w.toml:4",
        ),
        (
            format!("{}[models.b]\nmodel = \"m.gguf\"\ngroups = [\"g\"]\n", model("groups = [\"g\"]\npin = true")),
            "w.toml:5",
        ),
        (
            format!(
                "[loading]\nmax_loaded = 1\n{}[models.b]\nmodel = \"m.gguf\"\npin = true\n",
                model("pin = true")
            ),
            "w.toml:2",
        ),
        (model("replicas = 3\npolicy.host.soft = \"6GiB\""), "w.toml:5"),
        (
            format!("admin.address = \"127.0.0.1:8080\"\n{}", model("")),
            "w.toml:1",
        ),
        (format!("log.access = \"m.gguf\"\n{}", model("")), "w.toml:1"),
        (
            model("request = { max_tokens = 100, default = { max_tokens = 500 } }"),
            "w.toml:4",
        ),
        (
            model("request.max_tokens = 9000").replace("\"-np\"", "\"-c\", \"8192\", \"-np\""),
            "w.toml:4",
        ),
        (
            model("request = { set = { top_k = 1 }, default = { top_k = 2 } }"),
            "w.toml:4",
        ),
        (
            format!("[upstream]\nstream_idle = \"2h\"\n{}", model("")),
            "w.toml:2",
        ),
        (
            format!("[server]\nbody_timeout = \"20m\"\n{}", model("")),
            "w.toml:2",
        ),
        (
            format!("[upstream]\nstream_idle = \"20s\"\n{}", model("")),
            "w.toml:3",
        ),
        (
            model("").replace("\"-np\"", "\"--sse-ping-interval\", \"-1\", \"-np\""),
            "w.toml:3",
        ),
        (
            model("").replace("\"-np\"", "\"--sse-ping-interval\", \"300\", \"-np\""),
            "w.toml:3",
        ),
        (
            model("policy.only = \"02:00-05:00\"\npolicy.max_age = \"6h\""),
            "w.toml:5",
        ),
        (model("lifecycle.backoff_first = \"2m\""), "w.toml:4"),
        (model("policy.min_interval_hard = \"1h\""), "w.toml:4"),
        (model("policy.quiet_for = \"1h\""), "w.toml:4"),
        (model("policy.only = \"02:00-02:05\"\npolicy.quiet_for = \"10m\""), "w.toml:4"),
        (model("policy.max_age = \"5m\""), "w.toml:4"),
        (model("policy.growth_drain = \"1d\""), "w.toml:4"),
    ] {
        let said = only(&text);
        assert!(said.starts_with(&format!("{place}: ")), "{place}: {said}");
        all.extend([said.as_str(), "\n"]);
    }
    insta::assert_snapshot!(all);
}
