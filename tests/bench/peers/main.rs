//! llama-warden beside nginx, haproxy and no proxy at all: the same load, the same mock upstream, one after the other in
//! shuffled order, round by round. Prints every figure, and which targets are met.
//!
//! `cargo bench -p warden-tests --bench peers` (`-- --help` for parts and options). The proxy has one core, load and mock
//! have the other; it needs Linux with two of them, `taskset` and `setpriv`, and takes nginx, haproxy, strace and llama-swap
//! where they are installed.
//!
//! | module | job |
//! |---|---|
//! | `stage`, `warden` | starts the mock and the proxies |
//! | `load` | makes the requests and takes the times |
//! | `machine` | CPUs, CPU time, memory, system calls |
//! | `viewers` | those who look at the page meanwhile |
//! | `measure`, `metrics` | one part for one peer; its names |
//! | `figures`, `targets` | medians, ratios, tables |

mod figures;
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

/// The parts that a peer takes as it is, after whatever came before.
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
    // Before this process has one core and real-time priority: cargo inherits both, and a build under them takes the
    // machine away from everybody.
    binaries::llama_warden()?;
    binaries::mock_llama()?;
    machine::pin(i32::try_from(std::process::id())?, machine::LOAD)?;
    if options.fifo {
        machine::real_time()?;
    }
    let stage = Stage::new(options)?;
    // The slow kind: each figure from processes that have done nothing else.
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
    let (mut all, missing) = peers(&stage, options)?;
    figures.notes.extend(missing);
    for round in 0..options.rounds {
        for (part, measure) in RUNNING.iter().chain(&[("bodies", measure::bodies as Measure)]) {
            // What is exact needs no rounds.
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
                    // What others do wrong is worth a line; the yardstick and ourselves have to work. Gates need none: nginx
                    // answers 502 where its upstream closes an idle connection in the moment of a request.
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

/// Starts all proxies anew and looks at each of them.
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
