//! Each rule with a configuration that it is for, and the numbers in what it says.

use crate::config::machine::Machine;
use crate::config::resolve::resolve;
use crate::config::source::layers::{Sources, load};
use warden_policies::ByteSize;

/// What is told about a configuration on a machine of 16 GiB: problems first, then warnings, each with its hint.
fn told(text: &str) -> Vec<String> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("m.gguf"), "").unwrap();
    let file = dir.path().join("w.toml");
    std::fs::write(&file, text).unwrap();
    let loaded = load(Sources { file: Some(file), ..Sources::default() }).unwrap();
    let mut machine = Machine::read();
    machine.env.clear();
    machine.memory = ByteSize(16 << 30);
    let found = match resolve(&loaded, &machine, false) {
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

/// Of a model `a`, with a cache that is below any budget here.
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
        format!(
            "[server]\nconnections = 8\nconnections_per_peer = 8\nh2c = true\n{}",
            model("replicas = 100")
        ),
    ] {
        assert_eq!(told(&text), [""; 0], "{text}");
    }
}

#[test]
fn each_contradiction_is_told_with_its_place_its_numbers_and_a_cure() {
    for (text, place, parts) in [
        (model("policy.host = { soft = \"8GiB\", hard = \"4GiB\" }"), "w.toml:4", &["hard budget (4.0 GiB) is below the soft one (8.0 GiB)"][..]),
        (format!("{}[shared.vram]\nsoft = \"90%\"\nhard = \"80%\"\n", model("")), "w.toml:7", &["hard budget (80%) is below the soft one (90%)"]),
        (model("policy.vram.hard = 12"), "w.toml:4", &["a budget of 12 B", "without a unit is bytes", "`\"12GiB\"`"]),
        (format!("{}[shared.host]\nhard = \"5KiB\"\n", model("")), "w.toml:6", &["a budget of 5.0 KiB is below what any process holds"]),
        (model("policy.host.hard = \"64GiB\""), "w.toml:4", &["64.0 GiB", "16.0 GiB", "never passed"]),
        (
            "[models.a]\nmodel = \"m.gguf\"\nargs = [\"-np\", \"2\", \"--ctx-checkpoints\", \"8\"]\npolicy.host.soft = \"4GiB\"\n".to_owned(),
            "w.toml:4",
            &["4.0 GiB is below the prompt cache, which may grow to 8.0 GiB", "up to 16 context checkpoints (8 for each of 2 slots)", "`--cache-ram MIB`"],
        ),
        (
            "[models.a]\nmodel = \"m.gguf\"\nenv.LLAMA_ARG_CACHE_RAM = \"-1\"\npolicy.host.hard = \"4GiB\"\n".to_owned(),
            "w.toml:4",
            &["has no bound"],
        ),
        (
            format!("[internal.growth]\nkept = 10\nwindow = 20\n{}", model("")),
            "w.toml:2",
            &["(10) is below `internal.growth.window` (20)"],
        ),
        (
            format!("[server]\nconnections = 6\nconnections_per_peer = 6\n{}", model("replicas = 2\nqueue.depth = 1")),
            "w.toml:2",
            &["8 requests at a time", "lets 6 in", "other 2 slots", "raise `server.connections` to 8"],
        ),
        (format!("[server]\nconnections = 100\nconnections_per_peer = 200\n{}", model("queue.depth = 9")), "w.toml:3", &["(200)", "(100)"]),
        (model("queue.depth = 5000"), "w.toml:4", &["`queue.depth` is 5000", "lets 4096 requests in"]),
        (model("max_in_flight = 6"), "w.toml:4", &["`max_in_flight` is 6", "4 slots", "2 requests wait inside"]),
        (format!("[server]\nbody_bytes = \"512MiB\"\n{}", model("")), "w.toml:2", &["512.0 MiB", "256.0 MiB", "raise `server.buffered_bytes` to 768.0 MiB"]),
        (format!("[upstream]\nexchange_timeout = \"200s\"\n{}", model("queue.wait = \"5m\"")), "w.toml:6", &["5 min", "3 min 20 s"]),
        (
            format!("[upstream]\nexchange_timeout = \"200s\"\n{}", model("queue.wait = \"9s\"")),
            "default",
            &["wait 9 s", "5 min 10 s more", "ends after 3 min 20 s", "above 5 min 19 s"],
        ),
        (model("lifecycle.suspect_timeout = \"5s\""), "w.toml:4", &["after 5 s", "15 s", "raise `suspect_timeout` above 15 s"]),
        (model("lifecycle.start_timeout = \"20ms\"\nlifecycle.probe_timeout = \"5ms\""), "w.toml:4", &["every 25 ms", "given up after 20 ms"]),
        (model("lifecycle.start_timeout = \"5s\""), "w.toml:4", &["given up after 5 s", "may take 10 s", "above 10 s"]),
        (
            model("policy.host.soft = \"8GiB\"\n[shared.host]\nsoft = \"40%\""),
            "w.toml:4",
            &["`policy.host.soft` is 8.0 GiB", "`shared.host.soft`, over all processes, is 40%", "passed first"],
        ),
        (
            model("policy.vram.hard = \"90%\"\n[shared.vram]\nhard = \"80%\""),
            "w.toml:4",
            &["is 90%", "is 80%"],
        ),
        (model("replicas = 3\npolicy.host.soft = \"6GiB\""), "w.toml:5", &["3 processes", "6.0 GiB each", "18.0 GiB in all", "16.0 GiB"]),
        (
            format!("admin.address = \"127.0.0.1:8080\"\n{}", model("")),
            "w.toml:1",
            &["127.0.0.1:8080", "`server.port` is 8080 on 127.0.0.1", "another port"],
        ),
        (
            format!("log.access = \"a.log\"\n{}", model("record_requests = \"a.log\"")),
            "w.toml:5",
            &["`models.a.record_requests` is written to, and `log.access` is the same file, a.log"],
        ),
        (model("record_requests = \"m.gguf\""), "w.toml:4", &["and `models.a.model` is the same file, m.gguf"]),
        (
            model("request = { max_tokens = 100, default = { max_tokens = 500 } }"),
            "w.toml:4",
            &["asks for 500 tokens (`max_tokens`)", "lets 100 be generated", "lower `max_tokens` to 100"],
        ),
        (
            model("request.max_tokens = 9000").replace("\"-np\"", "\"-c\", \"8192\", \"-np\""),
            "w.toml:4",
            &["lets 9000 tokens", "has 8192 tokens of context", "below 8192"],
        ),
        (
            model("request = { set = { top_k = 1 }, default = { top_k = 2 } }"),
            "w.toml:4",
            &["`request.set` gives every request a `top_k`"],
        ),
        (
            format!("[upstream]\nstream_idle = \"2h\"\n{}", model("")),
            "w.toml:2",
            &["`upstream.stream_idle` is 2 h", "ends after 1 h in all"],
        ),
        (
            format!("[server]\nbody_timeout = \"20m\"\n{}", model("")),
            "w.toml:2",
            &["`server.body_timeout` is 20 min", "a body ends after 15 min"],
        ),
        (
            format!("[upstream]\nstream_idle = \"20s\"\n{}", model("")),
            "w.toml:3",
            &["ended after 20 s", "only every 30 s", "well above 30 s"],
        ),
        (
            model("").replace("\"-np\"", "\"--sse-ping-interval\", \"-1\", \"-np\""),
            "w.toml:3",
            &["silent while a prompt is computed", "may take 15 min", "ended after 2 min", "leave `--sse-ping-interval` out"],
        ),
        (
            model("").replace("\"-np\"", "\"--sse-ping-interval\", \"300\", \"-np\""),
            "w.toml:3",
            &["ended after 2 min", "only every 5 min"],
        ),
        (
            model("policy.only = \"02:00-05:00\"\npolicy.max_age = \"6h\""),
            "w.toml:5",
            &["`max_age` is 6 h", "closed for up to 21 h", "may become 1 d 3 h old"],
        ),
        (model("lifecycle.backoff_first = \"2m\""), "w.toml:4", &["(2 min)", "above `backoff_cap`"]),
        (model("policy.min_interval_hard = \"1h\""), "w.toml:4", &["`min_interval_hard` (1 h) is above `min_interval` (10 min)"]),
        (model("policy.quiet_for = \"1h\""), "w.toml:4", &["for 1 h", "at most 30 min"]),
        (model("policy.only = \"02:00-02:05\"\npolicy.quiet_for = \"10m\""), "w.toml:4", &["02:00-02:05", "open for 5 min", "needs 10 min"]),
        (model("policy.max_age = \"5m\""), "w.toml:4", &["`max_age` is 5 min", "10 min apart"]),
        (model("policy.growth_drain = \"1d\""), "w.toml:4", &["within 1 d", "within 12 h"]),
    ] {
        let said = only(&text);
        assert!(said.starts_with(&format!("{place}: ")), "{place}: {said}");
        for part in parts {
            assert!(said.contains(part), "`{part}` is missing in {said}");
        }
    }
}
