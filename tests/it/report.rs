//! The GPU memory report of a patched llama-server is shown to the operator, and its file is removed.

use std::path::{Path, PathBuf};

use rustix::process::Signal;
use serde_json::{Value, json};
use warden_rig::process::ProcessId;
use warden_rig::warden::{CHAT, SOON, Setup, chat, json_lines};
use warden_rig::{Context as _, Outcome, Trouble, Warden, wait_for, wait_until};

const VARIABLE: &str = "LLAMA_WARDEN_REPORT";

const OFTEN: &str = "sensors.interval = \"25ms\"\ninternal.sensors.idle_settle = \"1ms\"";

/// The patched llama-server keeps at most two graphs.
const CAP: &str = "defaults.env.LLAMA_WARDEN_GRAPH_CACHE_CAP = \"2\"";

/// Starts one model that writes a memory report.
async fn start(script: &Value, top: &str, toml: &str) -> Result<(Warden, ProcessId), Trouble> {
    let warden = Setup::new()?.top(OFTEN).top(top).fake("m", script, toml)?.start().await?;
    let backend = warden.until_ready(1).await?[0];
    Ok((warden, backend))
}

fn file_of(backend: ProcessId) -> Result<PathBuf, Trouble> {
    backend.variable(VARIABLE).map(PathBuf::from).context("it was told no file")
}

async fn ask(warden: &Warden, requests: u32) -> Outcome {
    for n in 0..requests {
        let answer = warden.http.post(CHAT, &chat(&format!("r-{n}"), "m", "hi", 2, false)).await?;
        assert!(answer.answer()?.is_whole());
    }
    Ok(())
}

/// First context of the report in the status, or null.
async fn shown(warden: &Warden) -> Value {
    let status = warden.status("m").await.unwrap_or_default();
    status["backends"][0]["report"]["contexts"][0].clone()
}

async fn until_computes(warden: &Warden, computes: u64) -> Outcome {
    let what = format!("the status shows {computes} computes");
    wait_until(&what, SOON, async || shown(warden).await["computes"] == computes).await
}

fn left(file: &Path) -> Result<Vec<PathBuf>, Trouble> {
    let Ok(entries) = std::fs::read_dir(file.parent().context("a directory")?) else { return Ok(Vec::new()) };
    let paths = entries.filter_map(Result::ok).map(|entry| entry.path());
    Ok(paths.filter(|path| path.extension().is_some_and(|end| end == "report")).collect())
}

async fn until_alone(file: &PathBuf) -> Outcome {
    wait_until("the old report is gone", SOON, async || {
        left(file).is_ok_and(|found| found == std::slice::from_ref(file))
    })
    .await
}

#[tokio::test]
async fn what_a_backend_reports_is_in_status_and_metrics() -> Outcome {
    let (warden, backend) = start(&json!({}), CAP, "").await?;
    ask(&warden, 5).await?;
    until_computes(&warden, 5).await?;

    let ran = warden.cli(&["status", "--json"]).await?;
    let status: Value = serde_json::from_str(&ran.stdout)?;
    let report = &status["fleet"]["models"][0]["backends"][0]["report"];
    assert_eq!(report["pid"], backend.pid);
    assert_eq!(report["active"], json!(["graph-cache-cap", "memory-report"]));
    assert_eq!(report["settings"]["graph_cap"], 2);
    let context = &report["contexts"][0];
    for (name, number) in [
        ("device", 0),
        ("graphs_live", 2),
        ("graphs_evicted", 3),
        ("graph_host_bytes", 1280 << 10),
        ("pool_bytes", 20 << 20),
        ("cublas_handles", 1),
    ] {
        assert_eq!(context[name], number, "{name} in {report}");
    }

    let table = warden.cli(&["status"]).await?.stdout;
    let line = "  CUDA: 2 graphs (cap 2, 3 evicted, ~1.2 MiB host + ~512.0 KiB VRAM), \
                pools 20.0 MiB cached (peak 20.0 MiB), 1 cuBLAS handle";
    assert!(table.lines().any(|have| have == line), "{line} is missing in\n{table}");

    let lines = [
        "cuda_graphs{model=\"m\",replica=\"0\",device=\"0\"} 2",
        "cuda_graphs_evicted_total{model=\"m\",replica=\"0\",device=\"0\"} 3",
        "cuda_graph_bytes{model=\"m\",replica=\"0\",device=\"0\",kind=\"device\"} 524288",
        "cuda_pool_bytes{model=\"m\",replica=\"0\",device=\"0\"} 20971520",
        "cublas_handles{model=\"m\",replica=\"0\",device=\"0\"} 1",
    ];
    warden.until_metrics(&lines.map(|line| format!("llama_warden_backend_{line}"))).await?;
    Ok(())
}

#[tokio::test]
async fn each_generation_writes_a_file_of_its_own_and_the_ledger_keeps_the_sums_of_the_old_one() -> Outcome {
    let (mut warden, backend) = start(&json!({}), CAP, "").await?;
    let first = file_of(backend)?;
    assert!(first.exists());
    ask(&warden, 3).await?;
    until_computes(&warden, 3).await?;
    assert_eq!(warden.cli(&["restart", "m"]).await?.code, 0);

    let second = file_of(warden.until_ready(1).await?[0])?;
    assert!(second != first && second.exists());
    until_alone(&second).await?;
    until_computes(&warden, 0).await?;
    ask(&warden, 1).await?;
    until_computes(&warden, 1).await?;
    // Counters continue after a replacement.
    warden
        .until_metrics(&[
            "llama_warden_backend_cuda_computes_total{model=\"m\",replica=\"0\",device=\"0\"} 4",
        ])
        .await?;

    let entry = wait_for("an entry in the ledger", SOON, async || json_lines(&warden.recycles()).ok()?.pop());
    let entry = entry.await?;
    let sums = &entry["evidence"]["report"];
    assert_eq!((&sums["graphs_live"], &sums["pool_bytes"]), (&json!(2), &json!(12 << 20)), "{entry}");

    assert_eq!(warden.terminate(SOON).await?, 0);
    assert_eq!(left(&second)?, Vec::<PathBuf>::new());
    Ok(())
}

#[tokio::test]
async fn a_backend_that_dies_hard_leaves_no_file_once_it_is_reaped() -> Outcome {
    let hasty = "lifecycle.backoff_first = \"20ms\"\nlifecycle.backoff_cap = \"50ms\"\n";
    let (warden, backend) = start(&json!({}), "", hasty).await?;
    let first = file_of(backend)?;
    assert!(first.exists());
    backend.signal(Signal::KILL);
    wait_until("the next generation serves", SOON, async || {
        warden.until_ready(1).await.is_ok_and(|found| found[0] != backend)
    })
    .await?;
    let second = file_of(warden.until_ready(1).await?[0])?;
    until_alone(&second).await?;
    assert_ne!(first, second);
    Ok(())
}

#[tokio::test]
async fn without_a_report_or_with_a_corrupt_one_the_status_is_as_it_was() -> Outcome {
    for kind in ["none", "corrupt"] {
        let (warden, backend) = start(&json!({"report": kind}), "", "").await?;
        assert_eq!(file_of(backend)?.exists(), kind == "corrupt");
        ask(&warden, 1).await?;
        let backend = async || Ok::<_, Trouble>(warden.status("m").await?["backends"][0].clone());
        wait_until("memory was read after the request", SOON, async || {
            backend().await.is_ok_and(|shown| shown["work"]["requests"] == 1 && shown["host"].is_object())
        })
        .await?;
        let shown = backend().await?;
        assert!(shown.get("report").is_none(), "{kind}: {shown}");
        let table = warden.cli(&["status"]).await?.stdout;
        assert!(table.contains("loaded") && !table.contains("CUDA"), "{kind}: {table}");
        let metrics = warden.admin().get("/metrics").await?.text();
        assert!(!metrics.contains("backend_cuda_graphs{"), "{kind}: {metrics}");
    }
    Ok(())
}

#[tokio::test]
async fn a_report_can_be_declined_and_a_variable_of_the_models_own_comes_first() -> Outcome {
    let (_warden, backend) = start(&json!({}), "", "memory_report = false\n").await?;
    assert_eq!(backend.variable(VARIABLE), None);

    let directory = tempfile::tempdir()?;
    let own = directory.path().join("own.report");
    let top = format!("defaults.env.{VARIABLE} = '{}'", own.display());
    let (mut warden, backend) = start(&json!({}), &top, "").await?;
    assert_eq!(file_of(backend)?, own);
    ask(&warden, 2).await?;
    until_computes(&warden, 2).await?;
    assert_eq!(warden.terminate(SOON).await?, 0);
    assert!(own.exists(), "it is not ours to remove");
    Ok(())
}
