//! Ledger check: storms of 16 clients over 3 backends that are killed, stall, hang, are drained and reloaded,
//! and whose clients leave, each from a seed. An answered request was executed exactly once and as requested;
//! with `x-warden-executed: no` never; with `maybe` at most once; and no request stays unanswered. Most
//! errors show at the end of a storm, so many short storms find more than few long ones; errors that need
//! many replacements show in long ones.
//!
//! ```text
//! cargo test --profile release -p warden-tests --test ledger -- --nocapture
//! ```
//!
//! | variable | default | |
//! |---|---|---|
//! | `WARDEN_LEDGER_SEEDS` | 60 | how many seeds |
//! | `WARDEN_LEDGER_FIRST` | 1 | the first of them; one that failed is brought back with `SEEDS=1` |
//! | `WARDEN_LEDGER_REQUESTS` | 400 | requests of each |
//! | `WARDEN_LEDGER_AT_ONCE` | twice the cores | storms at a time: alone, one waits for half of its time |

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::Instant;
use warden_rig::storm::{Report, Storm};
use warden_rig::{Context as _, Outcome, Trouble, binaries};

fn variable(name: &str, default: u64) -> Result<u64, Trouble> {
    match std::env::var(name) {
        Ok(text) => text.parse().context(format!("{name}={text}")),
        Err(_) => Ok(default),
    }
}

#[tokio::test(flavor = "multi_thread")]
#[expect(clippy::disallowed_methods, reason = "tests stop where the system has no thread to give")]
async fn what_was_told_is_what_was_executed_in_every_storm() -> Outcome {
    let seeds = variable("WARDEN_LEDGER_SEEDS", 60)?;
    let first = variable("WARDEN_LEDGER_FIRST", 1)?;
    let requests = variable("WARDEN_LEDGER_REQUESTS", 400)?;
    let cores = std::thread::available_parallelism().map_or(2, usize::from) as u64;
    let at_once = variable("WARDEN_LEDGER_AT_ONCE", 2 * cores)?;
    // Build once, before several storms need the programs.
    binaries::llama_warden()?;
    binaries::fake_llama()?;
    let begun = Instant::now();
    let turns = Arc::new(Semaphore::new(usize::try_from(at_once)?));
    let mut storms = JoinSet::new();
    for seed in first..first + seeds {
        let turns = turns.clone();
        storms.spawn(async move {
            let _turn = turns.acquire_owned().await;
            // Each storm has its own thread, so that its waits stay there.
            let ended = tokio::task::spawn_blocking(move || storm(requests, seed)).await?;
            Ok::<_, Trouble>((seed, ended))
        });
    }
    let (mut failed, mut counts, mut all) = (Vec::new(), BTreeMap::<&str, usize>::new(), 0);
    while let Some(ended) = storms.join_next().await {
        match ended?? {
            (seed, Ok(report)) => {
                say(&format!("seed {seed}: {report:?}"));
                all += report.requests();
                report.counts.iter().for_each(|(label, count)| *counts.entry(label).or_default() += count);
            }
            (seed, Err(trouble)) => {
                say(&format!("seed {seed} FAILED: {trouble}"));
                failed.push(format!("seed {seed}: {trouble}"));
            }
        }
    }
    say(&format!("{all} requests, {counts:?}, in {:?}", begun.elapsed()));
    // Repeat the failures in the panic message, because often only the end of a long log is kept.
    let all_failed = failed.join("\n");
    assert!(
        failed.is_empty(),
        "again with WARDEN_LEDGER_FIRST=SEED WARDEN_LEDGER_SEEDS=1 WARDEN_LEDGER_REQUESTS={requests}:\n{all_failed}"
    );
    // Most requests of a storm must end well, or it would prove little.
    let whole = counts.get("whole").copied().unwrap_or(0);
    assert!(whole * 2 > all, "{counts:?} of {all}");
    Ok(())
}

fn storm(requests: u64, seed: u64) -> Result<Report, Trouble> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(Storm::large(requests, seed).run())
}

#[expect(clippy::print_stderr, reason = "the seeds and figures are what a run is for")]
fn say(line: &str) {
    eprintln!("{line}");
}
