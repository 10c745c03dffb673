//! One connection of the load: what it sends, what comes back.

use std::io::{self, Read as _, Write as _};
use std::net::SocketAddr;
use std::rc::Rc;

use warden_rig::poll::{Poller, Stream, now};
use warden_rig::{Context as _, Trouble};

use super::response::Response;

/// What reading once has brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Got {
    /// Nothing yet.
    Nothing,
    /// A part.
    Part,
    /// The end of the answer.
    End,
    /// The server closed the connection, between two answers.
    Closed,
}

/// A connection.
pub(crate) struct Client {
    stream: Stream,
    address: SocketAddr,
    token: u64,
    response: Response,
    request: Rc<[u8]>,
    written: usize,
    watched: bool,
    /// When the request was begun, in nanoseconds of the monotonic clock; for an open loop, when it was due.
    pub(crate) began: u64,
    pub(crate) busy: bool,
}

impl Client {
    pub(crate) fn open(address: SocketAddr, poller: &Poller, token: u64) -> Result<Self, Trouble> {
        let stream = Stream::connect(address).context(format!("connect to {address}"))?;
        poller.add(&stream, token)?;
        Ok(Self {
            stream,
            address,
            token,
            response: Response::new(),
            request: Rc::from([]),
            written: 0,
            watched: false,
            began: 0,
            busy: false,
        })
    }

    /// Connects anew.
    pub(crate) fn reopen(&mut self, poller: &Poller) -> Result<(), Trouble> {
        *self = Self::open(self.address, poller, self.token)?;
        Ok(())
    }

    /// Sends a request, as much of it as there is room for.
    pub(crate) fn send(&mut self, request: &Rc<[u8]>, poller: &Poller) -> Result<(), Trouble> {
        self.request = request.clone();
        self.written = 0;
        self.response.reset();
        self.busy = true;
        self.began = now();
        self.write(poller)
    }

    /// Goes on sending.
    pub(crate) fn write(&mut self, poller: &Poller) -> Result<(), Trouble> {
        while self.written < self.request.len() {
            match self.stream.write(&self.request[self.written..]) {
                Ok(count) => self.written += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if !self.watched {
                        self.watched = true;
                        poller.writes(&self.stream, self.token, true)?;
                    }
                    return Ok(());
                }
                Err(error) => return Err(Trouble::from(error)).context("sending"),
            }
        }
        if self.watched {
            self.watched = false;
            poller.writes(&self.stream, self.token, false)?;
        }
        Ok(())
    }

    /// Reads once and hands on what came of the body.
    pub(crate) fn read(&mut self, scratch: &mut [u8], data: impl FnMut(&[u8])) -> Result<Got, Trouble> {
        let count = match self.stream.read(scratch) {
            Ok(0) if !self.busy || self.response.is_fresh() => return Ok(Got::Closed),
            Ok(0) => return Err(Trouble::new("an answer broke off")),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Got::Nothing),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset && !self.busy => {
                return Ok(Got::Closed);
            }
            Err(error) => return Err(Trouble::from(error)).context("reading"),
        };
        self.response.feed(&scratch[..count], data)?;
        if self.response.status != 200 && self.response.status != 0 {
            let text = String::from_utf8_lossy(&scratch[..count]).into_owned();
            return Err(Trouble::new(format!("status {}: {text}", self.response.status)));
        }
        if !self.response.is_done() {
            return Ok(Got::Part);
        }
        self.busy = false;
        Ok(Got::End)
    }

    /// The server said that it closes.
    pub(crate) fn closes(&self) -> bool {
        self.response.closes
    }
}
