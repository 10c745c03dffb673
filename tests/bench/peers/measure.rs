//! Measurements. Each measures one peer in one round and adds its figures.

use std::time::Duration;

use warden_rig::{Context as _, Trouble};

use crate::figures::Figures;
use crate::load::LARGE;
use crate::load::requests::{Until, closed, hold, paced};
use crate::load::streams::{Wanted, one_by_one, run};
use crate::machine::{Strace, cpu_seconds, float, forget_peak, peak_mib, pss_mib};
use crate::metrics as m;
use crate::options::Options;
use crate::stage::Peer;

const CONNECTIONS: usize = 64;
const STREAMS: usize = 1000;
/// A later first event was held back: Nagle and a delayed acknowledgement cost 40 ms.
const STALL: u64 = 30_000_000;

pub(crate) type Measure = fn(&mut Figures, &Peer, &Options) -> Result<(), Trouble>;

/// Returns the quantile in microseconds of times in nanoseconds.
fn quantile(times: &mut [u64], share: f64) -> f64 {
    times.sort_unstable();
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "an index into at most millions of times"
    )]
    let index = ((times.len().saturating_sub(1)) as f64 * share).round() as usize;
    times.get(index).map_or(f64::NAN, |time| float(*time) / 1000.0)
}

fn time(options: &Options, seconds: f64) -> Duration {
    Duration::from_secs_f64(if options.quick { seconds / 2.0 } else { seconds })
}

/// Measures the request rate of one core.
pub(crate) fn rate(figures: &mut Figures, peer: &Peer, options: &Options) -> Result<(), Trouble> {
    let request = peer.target.small();
    closed(&peer.target, &request, CONNECTIONS, Until::Answers(2000))?;
    let before = cpu_seconds(&peer.pids)?;
    let done = closed(&peer.target, &request, CONNECTIONS, Until::After(time(options, 2.0)))?;
    let count = float(done.times.len() as u64);
    figures.add(m::RATE, &peer.name, count / done.seconds);
    if !peer.pids.is_empty() {
        figures.add(m::RATE_CPU, &peer.name, (cpu_seconds(&peer.pids)? - before) / count * 1e6);
    }
    Ok(())
}

/// Measures sequential requests with everything on one CPU, so that the added time is the proxy's work.
pub(crate) fn latency(figures: &mut Figures, peer: &Peer, options: &Options) -> Result<(), Trouble> {
    peer.place(true)?;
    let count = if options.quick { 4000 } else { 20_000 };
    let done = closed(&peer.target, &peer.target.small(), 1, Until::Answers(count));
    peer.place(false)?;
    let mut times = done?.times;
    figures.add(m::LATENCY_50, &peer.name, quantile(&mut times, 0.5));
    figures.add(m::LATENCY_99, &peer.name, quantile(&mut times, 0.99));
    Ok(())
}

/// Measures two thousand requests per second.
pub(crate) fn at_a_pace(figures: &mut Figures, peer: &Peer, options: &Options) -> Result<(), Trouble> {
    let request = peer.target.small();
    let mut done = paced(&peer.target, &request, CONNECTIONS, 2000, time(options, 3.0))?;
    figures.add(m::PACED_50, &peer.name, quantile(&mut done.times, 0.5));
    figures.add(m::PACED_99, &peer.name, quantile(&mut done.times, 0.99));
    Ok(())
}

/// Measures short streams one after the other on a kept connection.
pub(crate) fn first(figures: &mut Figures, peer: &Peer, options: &Options) -> Result<(), Trouble> {
    peer.place(true)?;
    let done = one_by_one(&peer.target, if options.quick { 300 } else { 1500 });
    peer.place(false)?;
    let mut done = done?;
    let stalls = done.firsts.iter().filter(|time| **time > STALL).count();
    figures.add(m::FIRST_50, &peer.name, quantile(&mut done.firsts, 0.5));
    figures.add(m::FIRST_STALLS, &peer.name, float(stalls as u64));
    Ok(())
}

/// Measures a thousand streams of twenty events per second each.
pub(crate) fn spaced(figures: &mut Figures, peer: &Peer, options: &Options) -> Result<(), Trouble> {
    let events = if options.quick { 40 } else { 80 };
    let wanted = Wanted { streams: STREAMS, events, per_second: 20, delays: true };
    let (mut cpu, mut seen) = (0.0, 0);
    let mut done = run(&peer.target, wanted, |streams| {
        cpu = cpu_seconds(&peer.pids)?;
        seen = streams.timed;
        Ok(())
    })?;
    let count = float(done.timed - seen);
    if !peer.pids.is_empty() {
        figures.add(m::SPACED_CPU, &peer.name, (cpu_seconds(&peer.pids)? - cpu) / count * 1e6);
    }
    figures.add(m::SPACED_MERGED, &peer.name, float(done.merged) / float(done.events) * 100.0);
    figures.add(m::SPACED_50, &peer.name, quantile(&mut done.delays, 0.5));
    figures.add(m::SPACED_99, &peer.name, quantile(&mut done.delays, 0.99));
    Ok(())
}

pub(crate) fn flood(figures: &mut Figures, peer: &Peer, options: &Options) -> Result<(), Trouble> {
    let events = if options.quick { 150 } else { 400 };
    let wanted = Wanted { streams: STREAMS, events, per_second: 0, delays: false };
    let before = cpu_seconds(&peer.pids)?;
    let done = run(&peer.target, wanted, |_| Ok(()))?;
    figures.add(m::FLOOD, &peer.name, float(done.events) / done.seconds);
    if !peer.pids.is_empty() {
        let cpu = cpu_seconds(&peer.pids)? - before;
        figures.add(m::FLOOD_CPU, &peer.name, cpu / float(done.events) * 1e6);
    }
    Ok(())
}

/// Measures images in base64, four at a time.
pub(crate) fn bodies(figures: &mut Figures, peer: &Peer, options: &Options) -> Result<(), Trouble> {
    for (metric, first) in [(m::BODIES_FIRST, true), (m::BODIES_LAST, false)] {
        let request = peer.target.large(first);
        closed(&peer.target, &request, 4, Until::Answers(8))?;
        let done = closed(&peer.target, &request, 4, Until::After(time(options, 2.0)))?;
        let bytes = float((done.times.len() * LARGE) as u64);
        figures.add(metric, &peer.name, bytes / done.seconds / 1e6);
    }
    Ok(())
}

/// Measures peak memory of a fresh process.
pub(crate) fn peak(figures: &mut Figures, peer: &Peer, first: bool) -> Result<(), Trouble> {
    forget_peak(&peer.pids)?;
    closed(&peer.target, &peer.target.large(first), 16, Until::Answers(64))?;
    let metric = if first { m::PEAK_FIRST } else { m::PEAK_LAST };
    figures.add(metric, &peer.name, peak_mib(&peer.pids)?);
    Ok(())
}

/// Measures memory of a fresh process, idle and with idle connections.
pub(crate) fn memory_idle(figures: &mut Figures, peer: &Peer) -> Result<(), Trouble> {
    figures.add(m::IDLE, &peer.name, pss_mib(&peer.pids)?);
    let held = hold(&peer.target, &peer.target.small(), STREAMS)?;
    figures.add(m::IDLE_CONNECTIONS, &peer.name, pss_mib(&peer.pids)?);
    drop(held);
    Ok(())
}

/// Measures memory of a fresh process with open streams.
pub(crate) fn memory_streams(figures: &mut Figures, peer: &Peer) -> Result<(), Trouble> {
    let mut memory = f64::NAN;
    let wanted = Wanted { streams: STREAMS, events: 6, per_second: 2, delays: false };
    run(&peer.target, wanted, |_| {
        memory = pss_mib(&peer.pids)?;
        Ok(())
    })?;
    figures.add(m::OPEN_STREAMS, &peer.name, memory);
    Ok(())
}

/// Counts system calls: of one client with small requests, and of 64 streams of 50 events per second with
/// their starts.
pub(crate) fn calls(figures: &mut Figures, peer: &Peer, options: &Options) -> Result<(), Trouble> {
    let folder = tempfile::tempdir()?;
    let request = peer.target.small();
    let count = 2000;
    closed(&peer.target, &request, 1, Until::Answers(50))?;
    let mut strace = Strace::attach(&peer.pids, folder.path())?;
    closed(&peer.target, &request, 1, Until::Answers(count))?;
    let counts = strace.counts()?;
    tell(figures, peer, options, m::CALLS_REQUEST, &counts, count as u64);
    // Threads wake each other more often on a busy machine; calls that read, write and wait do not depend on
    // that.
    let wakes = |name: &str| matches!(name, "futex" | "write");
    let plain: u64 = counts.iter().filter(|(name, _)| !wakes(name)).map(|(_, calls)| calls).sum();
    figures.add(m::CALLS_PLAIN, &peer.name, float(plain) / float(count as u64));
    drop(strace);
    let wanted = Wanted { streams: 64, events: 200, per_second: 50, delays: false };
    let mut strace = Strace::attach(&peer.pids, folder.path())?;
    let done = run(&peer.target, wanted, |_| Ok(()))?;
    tell(figures, peer, options, m::CALLS_EVENT, &strace.counts()?, done.events);
    Ok(())
}

fn tell(
    figures: &mut Figures,
    peer: &Peer,
    options: &Options,
    metric: crate::figures::Metric,
    counts: &[(String, u64)],
    of: u64,
) {
    let all: u64 = counts.iter().map(|(_, calls)| calls).sum();
    figures.add(metric, &peer.name, float(all) / float(of));
    if options.verbose {
        let named =
            counts.iter().take(10).map(|(name, calls)| format!("{name} {:.2}", float(*calls) / float(of)));
        figures.notes.push(format!("{}, {metric}: {}", peer.name, named.collect::<Vec<_>>().join(", ")));
    }
}

/// Measures if connections are kept and reused on both sides.
pub(crate) fn reuse(figures: &mut Figures, peer: &Peer, _options: &Options) -> Result<(), Trouble> {
    const CLIENTS: usize = 8;
    const STREAMS: u64 = 100;
    let carriers = || peer.counts()?["carriers"].as_u64().context("no count of connections");
    let before = carriers()?;
    let done = closed(&peer.target, &peer.target.small(), CLIENTS, Until::Answers(10_000))?;
    let used = carriers()? - before;
    // A stream costs its upstream connection, which llama-server closes, but not the client's.
    let streams = one_by_one(&peer.target, usize::try_from(STREAMS)?)?;
    let for_streams = carriers()? - before - used;
    if for_streams > STREAMS {
        figures.notes.push(format!("{}: {for_streams} connections for {STREAMS} streams", peer.name));
    }
    figures.add(m::RECONNECTS, &peer.name, float(done.reconnects + streams.reconnects));
    figures.add(m::UPSTREAMS, &peer.name, float(used) / float(CLIENTS as u64));
    Ok(())
}
