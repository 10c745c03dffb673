//! Cheap sockets of one thread without a runtime (epoll, a timer and the clock), for the mock upstream and
//! the load generator of `tests/bench/peers`.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::event::{Timespec, epoll};
use rustix::time::{
    ClockId, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, clock_gettime, timerfd_create,
    timerfd_settime,
};

/// Most events taken from the kernel at a time.
const BATCH: usize = 1024;
const TICK: u64 = u64::MAX;

/// Nanoseconds of the machine's monotonic clock, the same in all processes.
pub fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    let part = |number: i64| u64::try_from(number).unwrap_or_default();
    part(time.tv_sec) * 1_000_000_000 + part(time.tv_nsec)
}

/// Connection that never blocks.
#[derive(Debug)]
pub enum Stream {
    /// Over TCP, with `TCP_NODELAY`.
    Tcp(TcpStream),
    /// Over a Unix socket.
    Unix(UnixStream),
}

impl Stream {
    /// Connects over TCP.
    ///
    /// # Errors
    /// The server does not listen.
    pub fn connect(address: SocketAddr) -> io::Result<Self> {
        Self::tcp(TcpStream::connect(address)?)
    }

    /// Connects to a Unix socket.
    ///
    /// # Errors
    /// The server does not listen.
    pub fn connect_unix(path: &Path) -> io::Result<Self> {
        Self::unix(UnixStream::connect(path)?)
    }

    /// Wraps an accepted TCP connection.
    ///
    /// # Errors
    /// The connection is closed.
    pub fn tcp(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok(Self::Tcp(stream))
    }

    /// Wraps an accepted Unix connection.
    ///
    /// # Errors
    /// The connection is closed.
    pub fn unix(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self::Unix(stream))
    }
}

impl Read for Stream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.read(into),
            Self::Unix(stream) => stream.read(into),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.write(bytes),
            Self::Unix(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
        }
    }
}

/// Operations that are possible on one socket.
#[derive(Debug, Clone, Copy)]
pub struct Ready {
    /// Number with which the socket was added.
    pub token: u64,
    /// There are bytes to read, or the peer has closed.
    pub readable: bool,
    /// There is room to write.
    pub writable: bool,
}

/// Sockets of a thread.
pub struct Poller {
    epoll: OwnedFd,
    timer: OwnedFd,
    events: Vec<epoll::Event>,
}

impl Poller {
    /// Creates a poller without sockets.
    ///
    /// # Errors
    /// Too many files are open.
    pub fn new() -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        epoll::add(&epoll, &timer, epoll::EventData::new_u64(TICK), epoll::EventFlags::IN)?;
        Ok(Self { epoll, timer, events: Vec::with_capacity(BATCH) })
    }

    /// Watches a socket for bytes to read.
    ///
    /// # Errors
    /// The kernel refuses the call.
    pub fn add(&self, what: impl AsFd, token: u64) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, what, epoll::EventData::new_u64(token), epoll::EventFlags::IN)?)
    }

    /// Also watches a socket for room to write if `on`.
    ///
    /// # Errors
    /// The kernel refuses the call.
    pub fn writes(&self, what: impl AsFd, token: u64, on: bool) -> io::Result<()> {
        let flags = if on { epoll::EventFlags::IN | epoll::EventFlags::OUT } else { epoll::EventFlags::IN };
        Ok(epoll::modify(&self.epoll, what, epoll::EventData::new_u64(token), flags)?)
    }

    /// Ticks at this pace from now on; `None` stops the ticks.
    ///
    /// # Errors
    /// The kernel refuses the call.
    pub fn tick(&self, every: Option<Duration>) -> io::Result<()> {
        let every = every.unwrap_or_default();
        let seconds = i64::try_from(every.as_secs()).unwrap_or(i64::MAX);
        let spec = Timespec { tv_sec: seconds, tv_nsec: every.subsec_nanos().into() };
        let times = Itimerspec { it_interval: spec, it_value: spec };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &times)?;
        Ok(())
    }

    /// Waits at most `limit` for events (`None`: without limit) and appends them; returns true after a tick.
    ///
    /// # Errors
    /// The kernel refuses the call.
    pub fn wait(&mut self, limit: Option<Duration>, ready: &mut Vec<Ready>) -> io::Result<bool> {
        let limit = limit.map(|limit| Timespec {
            tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: limit.subsec_nanos().into(),
        });
        self.events.clear();
        let spare = rustix::buffer::spare_capacity(&mut self.events);
        match epoll::wait(&self.epoll, spare, limit.as_ref()) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
        let mut ticked = false;
        for event in &self.events {
            let (token, flags) = (event.data.u64(), event.flags);
            if token == TICK {
                let _count = rustix::io::read(&self.timer, &mut [0_u8; 8]);
                ticked = true;
                continue;
            }
            let gone = flags.intersects(epoll::EventFlags::HUP | epoll::EventFlags::ERR);
            ready.push(Ready {
                token,
                readable: gone || flags.contains(epoll::EventFlags::IN),
                writable: gone || flags.contains(epoll::EventFlags::OUT),
            });
        }
        Ok(ticked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_socket_is_ready_when_the_other_side_has_written() {
        let (mut near, far) = UnixStream::pair().unwrap();
        let (mut poller, mut ready) = (Poller::new().unwrap(), Vec::new());
        poller.add(&far, 7).unwrap();
        assert!(!poller.wait(Some(Duration::ZERO), &mut ready).unwrap());
        assert!(ready.is_empty());
        near.write_all(b"x").unwrap();
        poller.wait(None, &mut ready).unwrap();
        assert_eq!(ready.iter().map(|ready| (ready.token, ready.readable)).collect::<Vec<_>>(), [(7, true)]);
    }

    #[test]
    fn it_ticks_until_it_is_told_to_stop() {
        let (mut poller, mut ready) = (Poller::new().unwrap(), Vec::new());
        poller.tick(Some(Duration::from_micros(100))).unwrap();
        assert!(poller.wait(None, &mut ready).unwrap());
        poller.tick(None).unwrap();
        assert!(!poller.wait(Some(Duration::from_millis(2)), &mut ready).unwrap());
    }
}
