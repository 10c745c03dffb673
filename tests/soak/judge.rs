//! Judges llama-warden's own memory with its detector, by `policy replay` of the recordings. A leak planted
//! into a recording must be found, or the verdict would prove nothing.

use std::path::Path;

use serde_json::Value;
use warden_policies::trace;
use warden_rig::warden::SOON;
use warden_rig::{Context as _, Outcome, Trouble};

use crate::instance::Instance;
use crate::readings::Readings;

/// Readings before a verdict: in five minutes a program has filled its caches, and its warm-up must not
/// count.
const ENOUGH: usize = 300;
/// Readings with as many floors as a verdict needs, and the warm-up.
const PLANTED: usize = 600;
/// Growth in MiB that counts: a program of llama-warden has some 20 MiB.
const EFFECT_MIB: u64 = 4;

pub(crate) async fn judge(instance: &Instance, readings: &Readings) -> Outcome {
    let mut grows = Vec::new();
    for path in readings.with(ENOUGH) {
        let verdict = verdict(instance, &path).await?;
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let (last, slope) =
            (verdict["final"].as_str().unwrap_or("nothing").to_owned(), &verdict["slope_mib_per_request"]);
        crate::say(&format!(
            "{name}: {last}, floor {} MiB, slope {slope} MiB a request",
            verdict["floor_mib"]
        ));
        let leaked = !verdict["first_leaking_request"].is_null();
        if leaked || matches!(last.as_str(), "Leaking" | "Suspected") {
            grows.push(format!("{name}: {verdict}"));
        }
    }
    let (first, last, most) = readings.memory.unwrap_or_default();
    let mib = |bytes: u64| bytes >> 20;
    crate::say(&format!(
        "memory of all programs: {} MiB at first, {} MiB at last, {} MiB at most, in {:?}",
        mib(first),
        mib(last),
        mib(most),
        readings.age()
    ));
    if readings.with(PLANTED).contains(&readings.path("all")) {
        planted(instance, readings).await?;
    }
    grows.is_empty().then_some(()).context(format!("our own memory grows: {}", grows.join("\n")))
}

async fn verdict(instance: &Instance, path: &Path) -> Result<Value, Trouble> {
    let shown = path.to_string_lossy();
    let effect = format!("internal.growth.host_effect={EFFECT_MIB}MiB");
    let args = ["policy", "replay", "--json", "--set", &effect, &shown];
    let ran = instance.warden().home().warden(args, SOON).await?;
    let told: Value = serde_json::from_str(ran.stdout.trim()).context(ran.all())?;
    Ok(told["series"]["host"].clone())
}

/// Judges a recording with a planted leak of 256 MiB in total, 64 times the growth that counts. Programs come
/// and go, so their sum varies: a leak of 64 MiB in two hours is not found, and one of 128 MiB not always.
async fn planted(instance: &Instance, readings: &Readings) -> Outcome {
    let mut samples = trace::parse_recording(&std::fs::read_to_string(readings.path("all"))?)?;
    let requests = samples.last().map_or(1, |last| last.work.requests.max(1));
    for sample in &mut samples {
        if let Some(host) = &mut sample.host {
            host.anon += (EFFECT_MIB << 26) * sample.work.requests / requests;
        }
    }
    let lines: Vec<String> = samples.iter().map(trace::format_line).collect();
    let path = readings.folder().join("planted.jsonl");
    std::fs::write(&path, lines.join("\n"))?;
    let verdict = verdict(instance, &path).await?;
    (verdict["final"] == "Leaking").then_some(()).context(format!("a planted leak is not found: {verdict}"))
}
