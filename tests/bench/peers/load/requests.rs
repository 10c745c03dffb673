//! Requests with immediate answers: closed loops over kept connections, and an open loop at a fixed rate.

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use warden_rig::Trouble;
use warden_rig::poll::{Poller, now};

use super::Target;
use super::client::{Client, Got};

#[derive(Debug, Default)]
pub(crate) struct Requests {
    /// Nanoseconds of each request, from its first byte sent (or its due time) to the last byte received.
    pub(crate) times: Vec<u64>,
    pub(crate) seconds: f64,
    /// Connections that the server closed and that had to be replaced.
    pub(crate) reconnects: u64,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Until {
    After(Duration),
    Answers(usize),
}

struct Load {
    poller: Poller,
    clients: Vec<Client>,
    scratch: Vec<u8>,
}

impl Load {
    fn open(target: &Target, count: usize) -> Result<Self, Trouble> {
        let poller = Poller::new()?;
        let clients = (0..count as u64)
            .map(|token| Client::open(target.address, &poller, token))
            .collect::<Result<_, _>>()?;
        Ok(Self { poller, clients, scratch: vec![0; 64 << 10] })
    }
}

/// Runs clients that each send the next request after the last answer.
pub(crate) fn closed(
    target: &Target,
    request: &Rc<[u8]>,
    connections: usize,
    until: Until,
) -> Result<Requests, Trouble> {
    let Load { mut poller, mut clients, mut scratch } = Load::open(target, connections)?;
    let (mut done, mut ready, mut open) = (Requests::default(), Vec::new(), connections);
    let (limit, most) = match until {
        Until::After(time) => (time, usize::MAX),
        Until::Answers(most) => (Duration::from_secs(600), most),
    };
    let begin = now();
    let end = begin + u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
    let mut sent = connections;
    for client in &mut clients {
        client.send(request, &poller)?;
    }
    let mut last = begin;
    while open > 0 {
        ready.clear();
        poller.wait(Some(STALLED), &mut ready)?;
        if ready.is_empty() {
            return Err(Trouble::new(format!("nothing moves any more after {} answers", done.times.len())));
        }
        for one in &ready {
            let client = &mut clients[usize::try_from(one.token)?];
            if one.writable {
                client.write(&poller)?;
            }
            if !one.readable {
                continue;
            }
            match client.read(&mut scratch, |_| {})? {
                Got::Nothing | Got::Part => {}
                Got::Closed => {
                    done.reconnects += 1;
                    let busy = client.busy;
                    client.reopen(&poller)?;
                    if busy {
                        client.send(request, &poller)?;
                    }
                }
                Got::End => {
                    last = now();
                    done.times.push(last - client.began);
                    if last >= end || sent >= most {
                        open -= 1;
                        continue;
                    }
                    if client.closes() {
                        done.reconnects += 1;
                        client.reopen(&poller)?;
                    }
                    sent += 1;
                    client.send(request, &poller)?;
                }
            }
        }
    }
    done.seconds = seconds(last - begin);
    Ok(done)
}

/// Sends requests at a fixed rate; the time includes the wait for a free client.
pub(crate) fn paced(
    target: &Target,
    request: &Rc<[u8]>,
    connections: usize,
    per_second: u64,
    time: Duration,
) -> Result<Requests, Trouble> {
    let Load { mut poller, mut clients, mut scratch } = Load::open(target, connections)?;
    let (mut done, mut ready) = (Requests::default(), Vec::new());
    let mut free: VecDeque<usize> = (0..connections).collect();
    let mut waiting: VecDeque<u64> = VecDeque::new();
    let pace = 1_000_000_000 / per_second.max(1);
    poller.tick(Some(Duration::from_micros(100)))?;
    let begin = now();
    let end = begin + u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    let mut due = begin;
    loop {
        ready.clear();
        poller.wait(Some(STALLED), &mut ready)?;
        for one in &ready {
            let at = usize::try_from(one.token)?;
            let client = &mut clients[at];
            match client.read(&mut scratch, |_| {})? {
                Got::Nothing | Got::Part => {}
                Got::Closed => return Err(Trouble::new("the server closed a connection")),
                Got::End => {
                    done.times.push(now() - client.began);
                    free.push_back(at);
                }
            }
        }
        let time = now();
        while due <= time && due < end {
            waiting.push_back(due);
            due += pace;
        }
        while let (Some(due), Some(at)) = (waiting.front().copied(), free.front().copied()) {
            waiting.pop_front();
            free.pop_front();
            clients[at].send(request, &poller)?;
            // Only a wait for a free client counts, not a late tick of the load itself.
            if time - due > 1_000_000 {
                clients[at].began = due;
            }
        }
        if due >= end && waiting.is_empty() && free.len() == connections {
            break;
        }
        if time > end + u64::try_from(STALLED.as_nanos())? {
            return Err(Trouble::new("the server does not keep up"));
        }
    }
    done.seconds = seconds(now() - begin);
    Ok(done)
}

/// Longest time without any event before a run fails.
pub(crate) const STALLED: Duration = Duration::from_secs(20);

pub(crate) fn seconds(nanoseconds: u64) -> f64 {
    Duration::from_nanos(nanoseconds).as_secs_f64()
}

/// Connections that have carried one request and stay open.
pub(crate) struct Held {
    _open: (Vec<Client>, Poller),
}

/// Opens connections that each carry one request, and keeps them.
pub(crate) fn hold(target: &Target, request: &Rc<[u8]>, count: usize) -> Result<Held, Trouble> {
    let Load { mut poller, mut clients, mut scratch } = Load::open(target, 0)?;
    let mut ready = Vec::new();
    for token in 0..count as u64 {
        let mut client = Client::open(target.address, &poller, token)?;
        client.send(request, &poller)?;
        while client.busy {
            poller.wait(Some(STALLED), &mut ready)?;
            if client.read(&mut scratch, |_| {})? == Got::Closed {
                return Err(Trouble::new("the server closed a connection"));
            }
        }
        clients.push(client);
    }
    Ok(Held { _open: (clients, poller) })
}
