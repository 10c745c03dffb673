//! Checks events and ledger at the end, written by one program after the other: they must explain each
//! llama-server, each replacement that began, and each kill.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use serde_json::Value;
use warden_rig::{Context as _, Outcome, Trouble};

use crate::books::TOLD;

/// Instance and generation of a process: generations start over with each instance, and continue through its
/// upgrades.
type Generation = (u64, u64);

#[derive(Debug, Default)]
struct Life {
    pid: Option<u64>,
    ends: Vec<String>,
    drained: bool,
}

/// Compares events and ledger. `killed` holds the PIDs of killed processes, in order.
///
/// # Errors
/// A line is invalid, or an entry has no counterpart; the error shows the line.
pub(crate) fn audit(state: &Path, killed: &[i32]) -> Outcome {
    // A full file was rotated, and an older one removed: such a soak cannot be checked.
    let mut events = Vec::new();
    for name in ["events.jsonl.1", "events.jsonl"] {
        let path = state.join(name);
        events.extend(if path.exists() { lines(&path)? } else { Vec::new() });
    }
    let ledger = lines(&state.join("ledger.jsonl"))?;
    let mut wrong = processes(&events, killed);
    let (replacements, others): (Vec<&Value>, Vec<&Value>) =
        ledger.iter().partition(|entry| entry["kind"].is_null());
    wrong.extend(replaced(&events, &replacements));
    crate::say(&format!(
        "our own books: {} events, {} replacements, {} other entries, {} kills",
        events.len(),
        replacements.len(),
        others.len(),
        killed.len()
    ));
    let all = wrong.len();
    wrong.truncate(TOLD);
    wrong.is_empty().then_some(()).context(format!("{all} in our own books:\n{}", wrong.join("\n")))
}

fn lines(path: &Path) -> Result<Vec<Value>, Trouble> {
    let text = std::fs::read_to_string(path).context(path.display().to_string())?;
    text.lines()
        .map(|line| serde_json::from_str(line).context(format!("{}: {line}", path.display())))
        .collect()
}

/// Checks that each process ends once, and that a killed one is reported as killed.
fn processes(events: &[Value], killed: &[i32]) -> Vec<String> {
    let mut lives: BTreeMap<Generation, Life> = BTreeMap::new();
    // The last process of each PID: PIDs repeat only after tens of thousands.
    let mut of_pid: HashMap<u64, Generation> = HashMap::new();
    for event in events {
        let (Some(instance), Some(generation)) = (event["instance"].as_u64(), event["generation"].as_u64())
        else {
            continue;
        };
        let key = (instance, generation);
        let life = lives.entry(key).or_default();
        match event["kind"].as_str().unwrap_or_default() {
            "starting" => {
                life.pid = event["pid"].as_u64();
                of_pid.extend(life.pid.map(|pid| (pid, key)));
            }
            "draining" => life.drained = true,
            // A process that could not be spawned has no beginning.
            "crashed" if life.pid.is_none() => drop(lives.remove(&key)),
            kind @ ("crashed" | "stopped") => life.ends.push(format!("{kind} {}", event["exit"])),
            _ => {}
        }
    }
    let mut wrong = Vec::new();
    if lives.len() < killed.len().max(3) {
        wrong.push(format!("{} processes in all of the events", lives.len()));
    }
    for (generation, life) in &lives {
        if life.pid.is_none() || life.ends.len() != 1 {
            wrong.push(format!("generation {generation:?}: {life:?}"));
        }
    }
    for pid in killed {
        let life = u64::try_from(*pid).ok().and_then(|pid| lives.get(of_pid.get(&pid)?));
        // A draining process may have ended by itself at that moment, and a starting one is stopped, not
        // drained.
        let is_told = |end: &String| end.starts_with("crashed") || end.contains("signal 9");
        if !life.is_some_and(|life| life.drained || life.ends.iter().any(is_told)) {
            wrong.push(format!("process {pid} was killed: {life:?}"));
        }
    }
    wrong
}

/// Checks that each replacement that began has one entry, and each entry a beginning. Entries do not name
/// their instance, so a surplus of one may hide a lack of another.
fn replaced(events: &[Value], ledger: &[&Value]) -> Vec<String> {
    let key = |one: &Value, from: &str| format!("{} from {} for {}", one["model"], one[from], one["reason"]);
    let mut open: HashMap<String, i64> = HashMap::new();
    for event in events.iter().filter(|event| event["kind"] == "recycle_began") {
        *open.entry(key(event, "generation")).or_default() += 1;
    }
    for entry in ledger {
        // Only the ledger has a replacement that could not begin.
        if entry["failed"].is_null() || open.contains_key(&key(entry, "from")) {
            *open.entry(key(entry, "from")).or_default() -= 1;
        }
    }
    let odd = open.into_iter().filter(|(_, left)| *left != 0);
    odd.map(|(key, left)| format!("{key}: {left} more beginnings than entries of the ledger")).collect()
}
