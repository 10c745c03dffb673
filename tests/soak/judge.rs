//! The verdict on our own memory, by our own detector: `policy replay` over the recordings. A leak that is planted into one of them has
//! to be found, or the verdict would say nothing.

use std::path::Path;

use serde_json::Value;
use warden_policies::trace;
use warden_rig::warden::SOON;
use warden_rig::{Context as _, Outcome, Trouble};

use crate::instance::Instance;
use crate::readings::Readings;

/// Fewer readings say nothing: in five minutes a program has been through what it keeps, and a verdict on less may be one on its warm-up.
const ENOUGH: usize = 300;
/// As many floors as a verdict takes, with what comes before them.
const PLANTED: usize = 600;
/// What counts as growth, in MiB: a program of ours holds some 20.
const EFFECT_MIB: u64 = 4;

/// The verdict on each recording that is long enough.
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

/// The same with a leak of 64 times what counts as growth, 256 MiB over the whole: programs come and go, and their sum is a rough curve, in
/// which a leak of 64 MiB in two hours is not found, and one of 128 not always.
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
