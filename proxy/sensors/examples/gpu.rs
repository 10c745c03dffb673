//! Prints the GPUs as JSON, and the VRAM of each process group whose leader is given: `cargo run -p
//! warden-sensors --example gpu -- PID…`. With `--watch`, prints one line of JSON for each line of standard
//! input.

use std::io::{BufRead as _, Write as _};

use serde_json::{Value, json};
use warden_sensors::GpuSensors;

fn reading(gpus: &GpuSensors, leaders: &[u32]) -> Value {
    let read = gpus.read();
    let groups = leaders.iter().map(|leader| {
        let found = read.group_vram(*leader);
        let value = json!({"vram": found.readings, "unavailable": found.unavailable});
        (leader.to_string(), value)
    });
    let groups: serde_json::Map<String, Value> = groups.collect();
    json!({"devices": gpus.devices(), "readings": read.devices(), "groups": groups, "notes": gpus.notes()})
}

fn main() -> std::io::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let watch = arguments.iter().any(|argument| argument == "--watch");
    let leaders: Vec<u32> = arguments.iter().filter_map(|argument| argument.parse().ok()).collect();
    let gpus = GpuSensors::open();
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", reading(&gpus, &leaders))?;
    if watch {
        out.flush()?;
        for line in std::io::stdin().lock().lines() {
            line?;
            writeln!(out, "{}", reading(&gpus, &leaders))?;
            out.flush()?;
        }
    }
    Ok(())
}
