//! Streams: the time to the first byte, the delay of each event, and events that arrive merged or split.

use std::rc::Rc;
use std::time::Duration;

use memchr::memmem;
use warden_rig::Trouble;
use warden_rig::poll::{Poller, now};

use super::Target;
use super::client::{Client, Got};
use super::requests::{STALLED, seconds};

/// Text before the time in an event.
const TIME: &[u8] = b"\"t\":\"";
const DIGITS: usize = 20;
/// Nanoseconds within which all paced streams begin.
const BEGINNING: u64 = 1_000_000_000;

#[derive(Debug, Default)]
pub(crate) struct Streams {
    pub(crate) firsts: Vec<u64>,
    /// Nanoseconds from the mock's write of an event to its arrival, while all streams run; the start is left
    /// out.
    pub(crate) delays: Vec<u64>,
    /// Events with a parsed time, including those of the start.
    pub(crate) timed: u64,
    pub(crate) events: u64,
    pub(crate) merged: u64,
    pub(crate) split: u64,
    pub(crate) seconds: f64,
    /// Connections that were closed after a stream.
    pub(crate) reconnects: u64,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    pub(crate) streams: usize,
    pub(crate) events: u64,
    /// Events per second; 0 for no pause.
    pub(crate) per_second: u64,
    /// True to parse the times in events, which costs the load some time.
    pub(crate) delays: bool,
}

/// Counts events, and parses their times.
#[derive(Debug, Default)]
struct Eye {
    /// True if the last byte was a line feed.
    feed: bool,
    events: u64,
    times: u64,
}

impl Eye {
    fn see(&mut self, bytes: &[u8], arrived: Option<u64>, delays: &mut Vec<u64>) {
        // Two line feeds in a row end an event; they may arrive separately.
        let mut last = if self.feed { Some(usize::MAX) } else { None };
        for at in memchr::memchr_iter(b'\n', bytes) {
            if last == Some(at.wrapping_sub(1)) {
                self.events += 1;
                last = None;
            } else {
                last = Some(at);
            }
        }
        self.feed = last.is_some_and(|at| at.wrapping_add(1) == bytes.len());
        let Some(arrived) = arrived else { return };
        let mut rest = bytes;
        while let Some(at) = memmem::find(rest, TIME) {
            let start = at + TIME.len();
            let Some(digits) = rest.get(start..start + DIGITS) else { return };
            let written = digits.iter().fold(0, |sum: u64, digit| sum * 10 + u64::from(digit - b'0'));
            delays.push(arrived.saturating_sub(written));
            self.times += 1;
            rest = &rest[start + DIGITS..];
        }
    }
}

/// Runs all streams to their end. Calls `at_start` once all have had their first event.
pub(crate) fn run(
    target: &Target,
    wanted: Wanted,
    mut at_start: impl FnMut(&Streams) -> Result<(), Trouble>,
) -> Result<Streams, Trouble> {
    let request = target.stream(wanted.events, wanted.per_second);
    let mut poller = Poller::new()?;
    let (mut done, mut ready, mut scratch) = (Streams::default(), Vec::new(), vec![0; 64 << 10]);
    let (mut clients, mut eyes) = (Vec::new(), Vec::new());
    for token in 0..wanted.streams as u64 {
        clients.push(Some(Client::open(target.address, &poller, token)?));
        eyes.push(Eye::default());
    }
    // Paced streams begin within a second, not all at once. The mock sets the phases of their events, so that
    // waits at the start do not synchronize them.
    let spread = if wanted.per_second > 0 { BEGINNING / wanted.streams.max(1) as u64 } else { 0 };
    poller.tick((spread > 0).then_some(Duration::from_micros(100)))?;
    let begin = now();
    let (mut sent, mut first, mut open, mut last) = (0, 0, wanted.streams, begin);
    while open > 0 {
        while sent < wanted.streams && begin + spread * sent as u64 <= now() {
            if let Some(client) = &mut clients[sent] {
                client.send(&request, &poller)?;
            }
            sent += 1;
        }
        ready.clear();
        let limit = if sent < wanted.streams && spread == 0 { Duration::ZERO } else { STALLED };
        poller.wait(Some(limit), &mut ready)?;
        for one in &ready {
            let at = usize::try_from(one.token)?;
            let (Some(client), eye) = (&mut clients[at], &mut eyes[at]) else { continue };
            let mut arrived = None;
            let (before, times) = (eye.events, eye.times);
            let mut early = Vec::new();
            let all_run = first == wanted.streams && open == wanted.streams;
            let delays = if all_run { &mut done.delays } else { &mut early };
            let got = client.read(&mut scratch, |bytes| {
                let time = wanted.delays.then(|| *arrived.get_or_insert_with(now));
                eye.see(bytes, time, delays);
            })?;
            done.timed += eye.times - times;
            done.split +=
                u64::from(wanted.delays && got == Got::Part && eye.times - times > eye.events - before);
            if before == 0 && eye.events > 0 {
                first += 1;
                done.firsts.push(now() - client.began);
                if first == wanted.streams {
                    at_start(&done)?;
                }
            } else if got == Got::Part && eye.events - before > 1 {
                done.merged += 1;
            }
            match got {
                Got::End => {
                    open -= 1;
                    last = now();
                    // The last two events are the usage and the end mark.
                    if eye.events != wanted.events + 2 {
                        return Err(Trouble::new(format!("{} events of {}", eye.events, wanted.events + 2)));
                    }
                    done.events += wanted.events;
                    clients[at] = None;
                }
                Got::Closed => return Err(Trouble::new("a stream was not answered")),
                Got::Nothing | Got::Part => {}
            }
        }
        if now() - last > 600_000_000_000 {
            return Err(Trouble::new(format!("{open} streams do not end")));
        }
    }
    done.seconds = seconds(last - begin);
    Ok(done)
}

/// Runs short streams one after the other on one connection, which is kept if the server keeps it.
pub(crate) fn one_by_one(target: &Target, count: usize) -> Result<Streams, Trouble> {
    let request: Rc<[u8]> = target.stream(2, 0);
    let mut poller = Poller::new()?;
    let (mut done, mut ready, mut scratch) = (Streams::default(), Vec::new(), vec![0; 64 << 10]);
    let mut client = Client::open(target.address, &poller, 0)?;
    for number in 0..count {
        let (mut eye, mut first) = (Eye::default(), None);
        client.send(&request, &poller)?;
        loop {
            ready.clear();
            poller.wait(Some(STALLED), &mut ready)?;
            let got = client.read(&mut scratch, |bytes| {
                first.get_or_insert_with(now);
                eye.see(bytes, None, &mut Vec::new());
            })?;
            match got {
                Got::End => break,
                Got::Closed => {
                    done.reconnects += 1;
                    client.reopen(&poller)?;
                    client.send(&request, &poller)?;
                    (eye, first) = (Eye::default(), None);
                }
                Got::Nothing if ready.is_empty() => {
                    return Err(Trouble::new(format!("stream {number} hangs")));
                }
                Got::Nothing | Got::Part => {}
            }
        }
        done.firsts.push(first.unwrap_or_default().saturating_sub(client.began));
        done.events += 2;
        // A server closes the connection with its last byte or just after it.
        ready.clear();
        poller.wait(Some(Duration::ZERO), &mut ready)?;
        if !ready.is_empty() && client.read(&mut scratch, |_| {})? == Got::Closed {
            done.reconnects += 1;
            client.reopen(&poller)?;
        }
    }
    Ok(done)
}
