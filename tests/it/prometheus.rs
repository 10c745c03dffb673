//! Checks our metrics, alerts and dashboard: `promtool` checks the metrics, the alerts and their tests, and a
//! real Prometheus scrapes llama-warden and evaluates every expression. Without Prometheus these tests are
//! skipped, except in CI.

mod shipped;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use serde_json::{Value, json};
use warden_rig::process::Kid;
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Context as _, Home, Http, Outcome, Trouble, Warden, ports, wait_until};

use self::shipped::{ALERTS, ALERTS_TEST, alerts, panels, queries};

/// Set in CI, which installs Prometheus.
const REQUIRED: &str = "WARDEN_TEST_PROMETHEUS";

const EVERY: &str = "250ms";

/// Panels without data here: there is no GPU, patched backend, death, key or TLS.
const EMPTY: [&str; 15] = [
    "Certificate ends in",
    "Conversations at replacements",
    "Decoding of a busy slot",
    "Faults of GPUs",
    "Memory given back on demand",
    "Memory of GPUs",
    "Parts of patched backends",
    "Requests by API key",
    "Requests that did not end well",
    "Spans of traces",
    "Temperature of GPUs",
    "Tokens by API key",
    "VRAM and its budget",
    "VRAM by what it is",
    "Failed",
];

fn program(name: &str) -> Option<PathBuf> {
    let found = std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())
        .map(|folder| folder.join(name))
        .find(|path| path.is_file());
    assert!(found.is_some() || std::env::var_os(REQUIRED).is_none(), "{name} must be installed here");
    found
}

async fn promtool(program: &Path, home: &Home, args: &[&str], input: Option<&str>) -> Outcome {
    let mut command = tokio::process::Command::new(program);
    command.args(args).current_dir(home.path()).kill_on_drop(true);
    if let Some(input) = input {
        let file = home.file("input", input)?;
        command.stdin(Stdio::from(std::fs::File::open(file)?));
    }
    let ran = tokio::time::timeout(SOON, command.output()).await??;
    if ran.status.success() && (input.is_none() || ran.stderr.is_empty()) {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&[ran.stdout, ran.stderr].concat()).into_owned();
    Err(Trouble::new(format!("promtool {args:?}: {}: {said}", ran.status)))
}

#[tokio::test]
async fn alerts_are_sound_and_do_what_their_tests_say() -> Outcome {
    let Some(promtool_) = program("promtool") else {
        eprintln!("skipped: promtool is not installed");
        return Ok(());
    };
    let home = Home::new()?;
    promtool(&promtool_, &home, &["check", "rules", ALERTS], None).await?;
    promtool(&promtool_, &home, &["test", "rules", ALERTS_TEST], None).await
}

/// Starts one model that leaks towards its budget, and one that does not.
async fn fleet(port: u16) -> Result<Warden, Trouble> {
    let top = format!(
        "admin.address = \"127.0.0.1:{port}\"\nsensors.interval = \"50ms\"\ninternal.sensors.idle_settle = \"1ms\"\n\
         internal.growth.host_effect = \"4MiB\"\ninternal.growth.allowance_slack = \"4MiB\""
    );
    let plain = "args = [\"-np\", \"4\", \"--metrics\", \"--cache-ram\", \"0\", \"--ctx-checkpoints\", \"0\"]\n\
                 policy.host.soft = \"20GiB\"\npolicy.host.hard = \"24GiB\"\npolicy.growth = \"observe\"\n";
    let leaks = json!({"leak_kib_per_request": 512});
    let setup = Setup::new()?.top(&top).fake("leaks", &leaks, plain)?.fake("m", &json!({}), plain)?;
    let warden = setup.start().await?;
    warden.until_ready(2).await?;
    Ok(warden)
}

async fn ask(warden: &Warden, model: &str, n: usize) -> Outcome {
    let body = chat(&format!("{model}-{n}"), model, "some words to say", 3, n.is_multiple_of(2));
    let answer = warden.http.post(CHAT, &body).await?;
    assert!(answer.status.is_success() && answer.answer()?.is_whole(), "{}", answer.text());
    Ok(())
}

async fn leaking(warden: &Warden) -> bool {
    let name = "llama_warden_backend_forecast_seconds{model=\"leaks\",replica=\"0\",series=\"host\",limit=\"host_hard\"}";
    warden.metric(name).await.is_ok_and(|seconds| seconds.is_some())
}

/// Starts a Prometheus that scrapes llama-warden and evaluates the alerts.
async fn prometheus(program: &Path, home: &Home, scraped: u16) -> Result<(Kid, Http), Trouble> {
    let port = ports::free()?;
    let config = format!(
        "global: {{ scrape_interval: {EVERY}, scrape_timeout: {EVERY}, evaluation_interval: {EVERY} }}\nrule_files: ['{ALERTS}']\n\
         scrape_configs:\n  - job_name: llama-warden\n    static_configs: [{{ targets: ['127.0.0.1:{scraped}'] }}]\n"
    );
    let config = home.file("prometheus.yml", config)?;
    let args: [OsString; 4] = [
        format!("--config.file={}", config.display()).into(),
        format!("--storage.tsdb.path={}", home.path().join("tsdb").display()).into(),
        format!("--web.listen-address=127.0.0.1:{port}").into(),
        "--log.level=warn".into(),
    ];
    let kid = Kid::start(program, &args, &home.env, home.path(), home.path().join("prometheus.log"))?;
    let http = Http::Tcp(([127, 0, 0, 1], port).into());
    let ready = wait_until("Prometheus is ready", SOON, async || {
        http.get("/-/ready").await.is_ok_and(|answer| answer.status == 200)
    });
    ready.await.map_err(|late| Trouble::new(format!("{late}: {}", kid.output())))?;
    Ok((kid, http))
}

fn encoded(text: &str) -> String {
    let byte = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    text.bytes().map(byte).collect()
}

async fn series(http: &Http, expression: &str) -> Result<usize, Trouble> {
    let answer = http.get(&format!("/api/v1/query?query={}", encoded(expression))).await?.json()?;
    if answer["status"] != "success" {
        return Err(Trouble::new(format!("{expression}: {answer}")));
    }
    Ok(answer["data"]["result"].as_array().context("no result")?.len())
}

#[tokio::test]
async fn a_real_prometheus_evaluates_all_that_is_shipped_over_a_real_fleet() -> Outcome {
    let (Some(server), Some(promtool_)) = (program("prometheus"), program("promtool")) else {
        eprintln!("skipped: prometheus is not installed");
        return Ok(());
    };
    let scraped = ports::free()?;
    let warden = fleet(scraped).await?;
    for n in 0..600 {
        if n >= 8 && leaking(&warden).await {
            break;
        }
        ask(&warden, "leaks", n).await?;
    }
    ask(&warden, "m", 0).await?;
    let home = Home::new()?;
    let (_server, http) = prometheus(&server, &home, scraped).await?;
    warden.restart("m", 1).await?;

    // promtool checks the text format.
    let text = warden.admin().get("/metrics").await?.text();
    promtool(&promtool_, &home, &["check", "metrics"], Some(&text)).await?;

    let mut wanted: BTreeMap<String, String> = BTreeMap::new();
    for panel in panels()? {
        let title = panel["title"].as_str().unwrap_or_default().to_owned();
        let is_empty = EMPTY.contains(&title.as_str());
        for expression in queries(&panel) {
            if is_empty {
                series(&http, &expression).await?;
            } else {
                wanted.insert(expression, title.clone());
            }
        }
    }
    assert!(wanted.len() > 40, "{wanted:?}");
    let mut n = 1;
    let filled = wait_until("all expressions of the dashboard have data", SOON * 2, async || {
        n += 1;
        // Rates need continuous requests, and percentiles a stream.
        for model in ["m", "leaks"] {
            ask(&warden, model, n).await.unwrap_or_default();
        }
        let mut missing = BTreeMap::new();
        for (expression, title) in &wanted {
            if !matches!(series(&http, expression).await, Ok(1..)) {
                missing.insert(expression.clone(), title.clone());
            }
        }
        wanted = missing;
        wanted.is_empty()
    });
    if let Err(late) = filled.await {
        let mut errors = Vec::new();
        for (expression, title) in &wanted {
            errors.push(format!("{title}: {expression}: {:?}", series(&http, expression).await));
        }
        return Err(Trouble::new(format!("{late}:\n{}", errors.join("\n"))));
    }

    // Alerts and annotations evaluate without an error, and no alert fires.
    let rules = http.get("/api/v1/rules").await?.json()?;
    let rules = rules["data"]["groups"][0]["rules"].as_array().context("no rules")?.clone();
    assert_eq!(rules.len(), alerts()?.len());
    wait_until("all alerts were evaluated", SOON, async || {
        let Ok(Ok(now)) = http.get("/api/v1/rules").await.map(|answer| answer.json()) else { return false };
        let rules = now["data"]["groups"][0]["rules"].as_array().cloned().unwrap_or_default();
        rules.iter().all(|rule| rule["health"] == "ok")
    })
    .await?;
    let firing: BTreeSet<&str> = rules
        .iter()
        .filter(|rule| rule["state"] == "firing")
        .filter_map(|rule| rule["name"].as_str())
        .collect();
    assert!(firing.is_empty(), "{firing:?}");
    for annotation in shipped::annotations()? {
        series(&http, &annotation).await?;
    }
    let up = http.get("/api/v1/targets").await?.json()?;
    let target: &Value = &up["data"]["activeTargets"][0];
    assert_eq!((&target["health"], &target["lastError"]), (&json!("up"), &json!("")), "{target}");
    Ok(())
}
