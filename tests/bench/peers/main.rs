//! Compares llama-warden with nginx, haproxy and no proxy: same load, same mock upstream, in random order,
//! round by round. Prints every figure, and the targets that are met.
//!
//! `cargo bench -p warden-tests --bench peers` (`-- --help` for parts and options). The proxy has one core;
//! load and mock share another. Needs Linux with two cores, `taskset` and `setpriv`; includes nginx, haproxy,
//! strace, valgrind and llama-swap if installed.
//!
//! | module | job |
//! |---|---|
//! | `stage`, `warden` | starts the mock and the proxies |
//! | `load` | sends the requests and measures the times |
//! | `machine` | CPUs, CPU time, memory, system calls |
//! | `viewers` | viewers of the page meanwhile |
//! | `instructions` | instructions of a request |
//! | `measure`, `metrics` | one part for one peer; its names |
//! | `figures`, `targets` | medians, ratios, tables |

mod figures;
mod instructions;
mod load;
mod machine;
mod measure;
mod metrics;
mod options;
mod stage;
mod targets;
mod viewers;
mod warden;

use std::process::ExitCode;

use warden_rig::{Trouble, binaries};

use crate::figures::{DIRECT, Figures};
use crate::measure::Measure;
use crate::metrics::START;
use crate::options::{HELP, Options};
use crate::stage::{Peer, Stage, peers};

/// Parts that run on a peer in its present state.
const RUNNING: [(&str, Measure); 8] = [
    ("calls", measure::calls),
    ("reuse", measure::reuse),
    ("latency", measure::latency),
    ("first", measure::first),
    ("rate", measure::rate),
    ("paced", measure::at_a_pace),
    ("spaced", measure::spaced),
    ("flood", measure::flood),
];

#[expect(clippy::print_stdout, clippy::print_stderr, reason = "a benchmark prints its figures")]
fn main() -> ExitCode {
    let mut words = std::env::args().skip(1);
    if words.next().as_deref() == Some(viewers::WORD) {
        return viewers::run(words);
    }
    let options = match Options::read(std::env::args().skip(1)) {
        Ok(Some(options)) => options,
        Ok(None) => {
            println!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Err(wrong) => {
            eprintln!("error: {wrong}");
            return ExitCode::from(2);
        }
    };
    let mut figures = Figures::default();
    let done = play(&options, &mut figures);
    println!("{}", figures.table());
    let mut missed = 0;
    for name in figures.wardens() {
        let (table, gates) = targets::table(&figures, &name, options.gates);
        println!("### {name}\n\n{table}");
        if name == warden::NAME {
            missed = gates;
        }
    }
    for note in &figures.notes {
        println!("- {note}");
    }
    match done {
        Err(trouble) => {
            eprintln!("error: {trouble}");
            ExitCode::FAILURE
        }
        Ok(()) if options.gates && missed > 0 => {
            eprintln!("error: {missed} gates are missed");
            ExitCode::FAILURE
        }
        Ok(()) => ExitCode::SUCCESS,
    }
}

fn play(options: &Options, figures: &mut Figures) -> Result<(), Trouble> {
    // Build before this process moves to one core with real-time priority: cargo would inherit both, and a
    // build would block the machine.
    binaries::llama_warden()?;
    binaries::mock_llama()?;
    machine::pin(i32::try_from(std::process::id())?, machine::LOAD)?;
    if options.fifo {
        machine::real_time()?;
    }
    let stage = Stage::new(options)?;
    // Slow parts, each with fresh processes.
    let fresh_rounds = if options.quick { 1 } else { options.rounds.min(3) };
    for _ in 0..fresh_rounds {
        if options.wants("start") || options.wants("memory") {
            each_fresh(&stage, options, figures, |figures, peer| {
                figures.add(START, &peer.name, peer.started_ms);
                if options.wants("memory") { measure::memory_idle(figures, peer) } else { Ok(()) }
            })?;
        }
        if options.wants("memory") {
            each_fresh(&stage, options, figures, measure::memory_streams)?;
        }
        if options.wants("peak") {
            for first in [true, false] {
                each_fresh(&stage, options, figures, |figures, peer| measure::peak(figures, peer, first))?;
            }
        }
    }
    if options.wants("instructions") {
        if machine::has("valgrind") {
            instructions::count(figures, &stage)?;
        } else {
            figures.notes.push("valgrind: not installed, instructions are not counted".to_owned());
        }
    }
    let (mut all, missing) = peers(&stage, options)?;
    figures.notes.extend(missing);
    for round in 0..options.rounds {
        for (part, measure) in RUNNING.iter().chain(&[("bodies", measure::bodies as Measure)]) {
            // Exact figures need no rounds.
            let once = ["calls", "reuse"].contains(part);
            if !options.wants(part) || (once && round > 0) {
                continue;
            }
            if *part == "calls" && !machine::has("strace") {
                figures.notes.push("strace: not installed, system calls are not counted".to_owned());
                continue;
            }
            shuffle(&mut all);
            for peer in &all {
                if once && peer.name == DIRECT {
                    continue;
                }
                progress(round, part, &peer.name);
                if let Err(trouble) = measure(figures, peer, options).and_then(|()| peer.is_looked_at()) {
                    let told = format!("{part}, {}: {trouble}", peer.name);
                    // A failure of another proxy is only reported; nginx and llama-warden must work. With
                    // gates, nginx may fail, too: it answers 502 if its upstream closes an idle connection at
                    // the moment of a request.
                    let others = ["haproxy", "llama-swap", "nginx"];
                    let others = if options.gates { &others[..] } else { &others[..2] };
                    if !others.contains(&peer.name.as_str()) {
                        return Err(Trouble::new(format!("{told}\n{}", peer.last_words())));
                    }
                    figures.notes.push(told.lines().next().unwrap_or_default().to_owned());
                }
                peer.forget_logs()?;
            }
        }
    }
    Ok(())
}

/// Starts each proxy afresh and measures it.
fn each_fresh(
    stage: &Stage,
    options: &Options,
    figures: &mut Figures,
    mut look: impl FnMut(&mut Figures, &Peer) -> Result<(), Trouble>,
) -> Result<(), Trouble> {
    let (mut all, _missing) = peers(stage, options)?;
    all.retain(|peer| peer.name != DIRECT);
    shuffle(&mut all);
    for peer in &all {
        progress(0, "fresh", &peer.name);
        look(figures, peer)?;
    }
    Ok(())
}

fn shuffle(peers: &mut [Peer]) {
    for at in (1..peers.len()).rev() {
        let random = rand::random_range(0..=at);
        peers.swap(at, random);
    }
}

#[expect(clippy::print_stderr, reason = "so that one sees that it goes on")]
fn progress(round: usize, part: &str, peer: &str) {
    eprintln!("round {}: {part}, {peer}", round + 1);
}
