//! A backend's VRAM as NVML reports it: shown, or reported as unknown, and kept below its budget. The tests
//! use a simulated NVML and need no GPU.

use serde_json::{Value, json};
use warden_rig::process::ProcessId;
use warden_rig::warden::{CHAT, SOON, Setup, chat, json_lines};
use warden_rig::{FakeGpu, FakeNvml, Home, Outcome, Trouble, Warden, wait_until};

const GIB: u64 = 1 << 30;

/// Frequent readings and no delays. The simulated GPU knows a new process only when a test adds it, so the
/// check for lost offload is off.
const OFTEN: &str = "sensors.interval = \"25ms\"\ninternal.sensors.idle_settle = \"1ms\"\ninternal.sensors.gpu_age = \"1ms\"\n\
                     internal.health.offload_vram = 0.0";
const EAGER: &str = "policy.jitter = 0.0\npolicy.quiet_for = \"1ms\"\npolicy.quiet_within = \"50ms\"\n\
                     policy.min_interval = \"1ms\"\npolicy.min_interval_hard = \"1ms\"\n";

fn used_by(process: Option<ProcessId>, listed: u64, used: u64) -> FakeGpu {
    let pid = process.and_then(|process| u32::try_from(process.pid).ok());
    FakeGpu {
        total: 80 * GIB,
        used,
        processes: pid.map(|pid| (pid, listed)).into_iter().collect(),
        xids: Vec::new(),
    }
}

/// Starts one model on a machine with an unused GPU.
async fn start(toml: &str) -> Result<(Warden, FakeNvml, ProcessId), Trouble> {
    let mut setup = Setup::new()?.top(OFTEN);
    let nvml = FakeNvml::in_home(&mut setup.home)?;
    nvml.say(&[used_by(None, 0, 0)])?;
    let warden = setup.fake("m", &json!({}), toml)?.start().await?;
    let backend = warden.until_ready(1).await?[0];
    Ok((warden, nvml, backend))
}

async fn memory(warden: &Warden) -> Value {
    warden.status("m").await.unwrap_or_default()["backends"][0]["memory"].clone()
}

async fn until_vram(warden: &Warden, expected: Value) -> Outcome {
    wait_until(&format!("the status shows {expected}"), SOON, async || {
        memory(warden).await["vram"] == expected
    })
    .await
}

#[tokio::test]
async fn vram_is_shown_as_the_driver_tells_it_else_estimated_else_unknown_with_the_reason() -> Outcome {
    let (warden, nvml, backend) = start("").await?;
    let shown = |bytes: u64, source: &str| json!([{"gpu": 0, "bytes": bytes, "source": source}]);
    nvml.say(&[used_by(Some(backend), 3 * GIB, 4 * GIB)])?;
    until_vram(&warden, shown(3 * GIB, "process")).await?;
    nvml.say(&[used_by(Some(backend), 0, 4 * GIB)])?;
    until_vram(&warden, shown(4 * GIB, "estimate")).await?;
    let mut shared = used_by(Some(backend), 0, 9 * GIB);
    shared.processes.push((1, 5 * GIB));
    nvml.say(&[shared])?;
    until_vram(&warden, json!([])).await?;
    let unknown = memory(&warden).await["vram_unknown"].clone();
    let reason = unknown.as_str().unwrap_or_default();
    assert!(
        reason.starts_with("the VRAM policy is off for GPU 0 because ")
            && reason.contains("others use the GPU"),
        "{unknown}"
    );
    Ok(())
}

async fn until_replaced(warden: &Warden, old: ProcessId) -> Result<ProcessId, Trouble> {
    let mut asked = 0;
    wait_until("the backend is another one", SOON, async || {
        asked += 1;
        let answer = warden.http.post(CHAT, &chat(&format!("r-{asked}"), "m", "hi", 2, false)).await;
        assert!(answer.is_ok_and(|answer| answer.status.is_success()));
        let now = warden.backends();
        now.len() == 1 && now.iter().all(|backend| backend.pid != old.pid)
    })
    .await?;
    Ok(warden.until_ready(1).await?[0])
}

async fn first_entry(warden: &Warden) -> Result<Value, Trouble> {
    wait_until("the ledger has the replacement", SOON, async || {
        json_lines(&warden.recycles()).is_ok_and(|entries| !entries.is_empty())
    })
    .await?;
    Ok(json_lines(&warden.recycles())?[0].clone())
}

#[tokio::test]
async fn a_backend_over_its_vram_budget_is_replaced_and_no_request_fails() -> Outcome {
    let (warden, nvml, old) = start(&format!("policy.vram.soft = \"2GiB\"\n{EAGER}")).await?;
    nvml.say(&[used_by(Some(old), GIB, GIB)])?;
    until_vram(&warden, json!([{"gpu": 0, "bytes": GIB, "source": "process"}])).await?;
    nvml.say(&[used_by(Some(old), 3 * GIB, 3 * GIB)])?;
    let new = until_replaced(&warden, old).await?;
    nvml.say(&[used_by(Some(new), GIB, GIB)])?;
    let entry = first_entry(&warden).await?;
    assert_eq!(entry["reason"], "vram_soft", "{entry}");
    assert_eq!(entry["vram_before"], json!([{"gpu": 0, "bytes": 3 * GIB, "source": "process"}]), "{entry}");
    until_vram(&warden, json!([{"gpu": 0, "bytes": GIB, "source": "process"}])).await
}

#[tokio::test]
async fn a_backend_whose_gpu_reports_a_fatal_fault_is_replaced_once() -> Outcome {
    let (warden, nvml, old) = start(EAGER).await?;
    let mut gpu = used_by(Some(old), GIB, GIB);
    nvml.say(std::slice::from_ref(&gpu))?;
    until_vram(&warden, json!([{"gpu": 0, "bytes": GIB, "source": "process"}])).await?;
    gpu.xids.push(79);
    nvml.say(&[gpu])?;
    let new = until_replaced(&warden, old).await?;
    let entry = first_entry(&warden).await?;
    assert_eq!(entry["reason"], "device_fault", "{entry}");
    // The fault is not blamed on the next process, although the driver still lists it.
    let mut gpu = used_by(Some(new), GIB, GIB);
    gpu.xids.push(79);
    nvml.say(&[gpu])?;
    until_vram(&warden, json!([{"gpu": 0, "bytes": GIB, "source": "process"}])).await?;
    assert_eq!(json_lines(&warden.recycles())?.len(), 1);
    assert_eq!(warden.backends(), [new]);
    Ok(())
}

/// Sets the log line on layers for later processes. No command names the file, because another command has no
/// history to compare with.
fn offload(home: &Home, layers: u32) -> Outcome {
    home.file("layers", format!("load_tensors: offloaded {layers}/33 layers to GPU\n"))?;
    Ok(())
}

/// A model whose first process has all layers on the GPU, and whose next ones have none.
async fn lost(toml: &str) -> Result<(Warden, FakeNvml, ProcessId), Trouble> {
    let mut setup = Setup::new()?
        .top(OFTEN)
        .top("internal.health.offload_retry = \"300ms\"\ninternal.health.offload_retry_most = \"600ms\"");
    let nvml = FakeNvml::in_home(&mut setup.home)?;
    nvml.say(&[used_by(None, 0, 0)])?;
    offload(&setup.home, 33)?;
    let fake = warden_rig::binaries::fake_llama()?.display().to_string();
    let home = setup.home.path().display();
    let text = format!("#!/bin/sh\ncat '{home}/layers' >&2\nexec '{fake}' \"$@\"\n");
    let program = setup.home.program("llama-server", text)?;
    let setup = setup.fake("m", &json!({}), toml)?;
    let config = setup.config().replace(&fake, &program.display().to_string());
    let file = setup.home.file("warden.toml", config)?;
    let warden = setup.start_with(&["serve".into(), "--config".into(), file.into()]).await?;
    let old = warden.until_ready(1).await?[0];
    let known = warden.home().path().join("state/llama-warden/growth.json");
    wait_until("what it has on the GPU is remembered", SOON, async || {
        std::fs::read_to_string(&known).is_ok_and(|text| text.contains("\"layers\": 33"))
    })
    .await?;
    offload(warden.home(), 0)?;
    Ok((warden, nvml, old))
}

#[tokio::test]
async fn a_successor_that_lost_the_gpu_is_not_used_while_the_old_process_can_serve() -> Outcome {
    let (warden, _nvml, old) = lost("replace = \"overlap\"\n").await?;
    let ran = warden.cli(&["restart", "m"]).await?;
    assert!(ran.code != 0 && ran.stderr.contains("0 of 33 layers"), "{ran:?}");
    wait_until("the old process is alone again", SOON, async || warden.backends() == [old]).await?;
    assert!(warden.http.post(CHAT, &chat("a", "m", "hi", 2, false)).await?.answer()?.is_whole());
    assert_eq!(warden.backends(), [old]);
    let failed = first_entry(&warden).await?["failed"].to_string();
    assert!(failed.contains("the running process stays"), "{failed}");
    let events = warden.cli(&["events"]).await?.stdout;
    assert!(events.contains("33 of 33 layers"), "{events}");
    // The GPU has recovered.
    offload(warden.home(), 33)?;
    let ran = warden.cli(&["restart", "m"]).await?;
    assert_eq!(ran.code, 0, "{ran:?}");
    let new = warden.until_ready(1).await?[0];
    assert!(new != old, "{new:?}");
    Ok(())
}

#[tokio::test]
async fn in_sequence_one_that_lost_the_gpu_serves_says_so_and_is_replaced_when_the_gpu_is_back() -> Outcome {
    let (warden, _nvml, old) = lost("replace = \"sequential\"\n").await?;
    assert_eq!(warden.cli(&["restart", "m"]).await?.code, 0);
    assert!(warden.http.post(CHAT, &chat("a", "m", "hi", 2, false)).await?.answer()?.is_whole());
    // The model restarts now and then, so it may have no process for a moment.
    wait_until("it is shown as degraded", SOON, async || {
        let shown = warden.status("m").await.unwrap_or_default()["backends"][0]["degraded"].to_string();
        let table = warden.cli(&["status"]).await.map(|ran| ran.stdout).unwrap_or_default();
        shown.contains("0 of 33 layers") && table.contains("33 of 33 layers")
    })
    .await?;
    assert!(!warden.backends().contains(&old));
    offload(warden.home(), 33)?;
    wait_until("a process with all layers serves", SOON, async || {
        let shown = warden.status("m").await.unwrap_or_default()["backends"].clone();
        let all = shown.as_array().map(Vec::as_slice).unwrap_or_default();
        // A process is checked a moment after it becomes ready.
        let entries = json_lines(&warden.recycles()).unwrap_or_default();
        let replaced = entries.iter().any(|entry| entry["reason"] == "degraded");
        replaced && all.len() == 1 && all[0]["phase"] == "ready" && all[0]["degraded"].is_null()
    })
    .await?;
    Ok(())
}
