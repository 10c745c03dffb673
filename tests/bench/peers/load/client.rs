//! Connection of the load: sends requests and reads answers.

use std::io::{self, Read as _, Write as _};
use std::net::SocketAddr;
use std::rc::Rc;

use warden_rig::poll::{Poller, Stream, now};
use warden_rig::{Context as _, Trouble};

use super::response::Response;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Got {
    Nothing,
    Part,
    End,
    /// The server closed the connection, between two answers.
    Closed,
}

pub(crate) struct Client {
    stream: Stream,
    address: SocketAddr,
    token: u64,
    response: Response,
    request: Rc<[u8]>,
    written: usize,
    watched: bool,
    /// Start of the request, in nanoseconds of the monotonic clock; in an open loop, the time at which it was
    /// due.
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

    pub(crate) fn reopen(&mut self, poller: &Poller) -> Result<(), Trouble> {
        *self = Self::open(self.address, poller, self.token)?;
        Ok(())
    }

    /// Sends as much of a request as there is room for.
    pub(crate) fn send(&mut self, request: &Rc<[u8]>, poller: &Poller) -> Result<(), Trouble> {
        self.request = request.clone();
        self.written = 0;
        self.response.reset();
        self.busy = true;
        self.began = now();
        self.write(poller)
    }

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

    /// Reads once and passes on the part of the body.
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

    /// Returns true if the server announced that it closes.
    pub(crate) fn closes(&self) -> bool {
        self.response.closes
    }
}
