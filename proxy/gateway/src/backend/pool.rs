//! Connections to one generation: opened when needed, kept while idle, closed when an exchange is abandoned.
//!
//! ```text
//!   checkout --> [ an idle connection, recent and open? ] --yes--> UpstreamConn
//!                      | no                                 |  exchange ended normally: put back
//!                      v                                    |  any other end: dropped, which closes it
//!                   connect --> refused: proof that nothing was sent
//! ```
//!
//! The runtime that registered a socket binds it to one thread, so each thread has its own shelf. Idle
//! connections are not polled. If a backend closes one, the next checkout or the sweeper notices. The sweeper
//! is a task that runs while there are idle connections.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use tokio_util::task::TaskTracker;
use warden_policies::{ServerFacts, defaults};
use warden_supervisor::LeaseAddress;

use crate::backend::{BackendLease, LeaseProvider, UpstreamConn};
use crate::config::GatewayConfig;
use crate::protocol::LEAST_BUFFER;
use crate::workers;

pub(crate) struct UpstreamContext {
    pub(crate) backends: Arc<dyn LeaseProvider>,
    pub(crate) config: Arc<GatewayConfig>,
    pub(crate) tasks: TaskTracker,
    threads: usize,
}

impl UpstreamContext {
    pub(crate) fn new(backends: Arc<dyn LeaseProvider>, config: Arc<GatewayConfig>, threads: usize) -> Self {
        Self { backends, config, tasks: TaskTracker::new(), threads }
    }

    pub(crate) fn pool(&self, lease: &dyn BackendLease) -> Arc<ConnectionPool> {
        lease.pool(&|| {
            let limits = PoolLimits {
                connect: self.config.upstream.connect_timeout,
                idle: self.config.upstream.idle_timeout,
                kept: self.config.upstream.idle_connections,
                kept_unknown: self.config.upstream.idle_connections_unknown,
                head: self.config.server.header_bytes.in_memory().max(LEAST_BUFFER),
            };
            ConnectionPool::new(self.threads, limits, self.tasks.clone())
        })
    }
}

#[derive(Debug)]
pub(crate) struct ConnectionPool {
    shelves: Box<[Mutex<PoolShelf>]>,
    kept: AtomicUsize,
    /// Each open connection, idle or in use, holds a clone.
    open: Arc<()>,
    limits: PoolLimits,
    pub(crate) tracker: TaskTracker,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct PoolLimits {
    pub(crate) connect: Duration,
    /// Maximum idle time of a connection that is used again.
    pub(crate) idle: Duration,
    /// Number of idle connections over all threads that are kept even if fewer are in use, if the backend can
    /// serve as many at a time.
    pub(crate) kept: usize,
    /// Maximum number of idle connections if the backend's capacity is unknown.
    pub(crate) kept_unknown: usize,
    /// Maximum size of a response head, in bytes.
    pub(crate) head: usize,
}

impl PoolLimits {
    /// Returns the maximum number of idle connections while `in_use` others carry requests. With a fixed
    /// maximum, a load above it would open a new connection for almost every request. An idle connection
    /// occupies a thread of a llama-server, so some threads are left for new connections, such as the
    /// supervisor's probes: half of them if few connections are in use.
    fn max_idle(&self, facts: ServerFacts, in_use: usize) -> usize {
        match facts.http_threads {
            Some(threads) if self.kept > 0 => {
                let threads = threads as usize;
                let without_load = self.kept.min(threads / 2);
                without_load.max(in_use.min(threads / 2).min(threads.saturating_sub(in_use)))
            }
            Some(_) => 0,
            None => self.kept.min(self.kept_unknown),
        }
    }
}

#[derive(Debug, Default)]
struct PoolShelf {
    idle: Vec<IdleConnection>,
    swept: bool,
}

#[derive(Debug)]
struct IdleConnection {
    conn: UpstreamConn,
    since: Instant,
}

impl ConnectionPool {
    pub(crate) fn new(threads: usize, limits: PoolLimits, tracker: TaskTracker) -> Self {
        let shelves = (0..threads.max(1)).map(|_| Mutex::default()).collect();
        Self { shelves, kept: AtomicUsize::new(0), open: Arc::new(()), limits, tracker }
    }

    fn shelf(&self) -> &Mutex<PoolShelf> {
        &self.shelves[workers::worker_number() % self.shelves.len()]
    }

    fn with_shelf<T>(&self, act: impl FnOnce(&mut PoolShelf) -> T) -> T {
        act(&mut self.shelf().lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn reuse(&self) -> Option<UpstreamConn> {
        loop {
            let IdleConnection { mut conn, since } = self.with_shelf(|shelf| shelf.idle.pop())?;
            self.kept.fetch_sub(1, Ordering::Relaxed);
            if since.elapsed() >= self.limits.idle {
                // The connections left on the shelf are older still.
                self.prune();
                return None;
            }
            if conn.settle() {
                return Some(conn);
            }
        }
    }

    pub(crate) async fn connect(&self, address: &LeaseAddress) -> io::Result<UpstreamConn> {
        let limit = match address {
            LeaseAddress::Process(_) => self.limits.connect,
            // A remote endpoint needs a name lookup and a TLS handshake over the network.
            LeaseAddress::Remote(_) => self.limits.connect.max(defaults().remote.answer_limit),
        };
        timeout(limit, UpstreamConn::connect(address, self.limits.head, self.open.clone()))
            .await
            .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
    }

    /// Keeps a connection whose last answer was read to its end.
    pub(crate) fn put_back(self: &Arc<Self>, mut conn: UpstreamConn, facts: ServerFacts) {
        if !conn.settle() {
            return;
        }
        let idle = self.kept.fetch_add(1, Ordering::Relaxed);
        // The pool itself holds one of the clones.
        let in_use = (Arc::strong_count(&self.open) - 1).saturating_sub(idle);
        if idle >= self.limits.max_idle(facts, in_use) {
            self.kept.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        let swept = self.with_shelf(|shelf| {
            shelf.idle.push(IdleConnection { conn, since: Instant::now() });
            std::mem::replace(&mut shelf.swept, true)
        });
        if !swept {
            drop(self.tracker.spawn(sweep_shelf(Arc::downgrade(self), self.limits.idle)));
        }
    }

    /// Closes connections that are too old or that the backend has closed. Returns false if none is left.
    fn prune(&self) -> bool {
        let (gone, left) = self.with_shelf(|shelf| {
            let gone: Vec<IdleConnection> = shelf
                .idle
                .extract_if(.., |idle| idle.since.elapsed() >= self.limits.idle || !idle.conn.settle())
                .collect();
            (gone, !shelf.idle.is_empty())
        });
        self.kept.fetch_sub(gone.len(), Ordering::Relaxed);
        left
    }
}

/// Prunes one thread's shelf until the shelf is empty or the pool is dropped.
async fn sweep_shelf(pool: Weak<ConnectionPool>, every: Duration) {
    loop {
        sleep(every).await;
        let Some(pool) = pool.upgrade() else { return };
        if !pool.prune() {
            let done = pool.with_shelf(|shelf| {
                shelf.swept = !shelf.idle.is_empty();
                !shelf.swept
            });
            if done {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Most idle connections to a server with these threads while so many others are in use.
    fn max_idle(kept: usize, http_threads: Option<u32>, in_use: usize) -> usize {
        let second = Duration::from_secs(1);
        let limits = PoolLimits { connect: second, idle: second, kept, kept_unknown: 2, head: 8192 };
        limits.max_idle(ServerFacts { http_threads, ..ServerFacts::default() }, in_use)
    }

    const ON_DEMAND: Option<u32> = Some(ServerFacts::THREADS_ON_DEMAND);

    #[test]
    fn idle_connections_leave_threads_to_others() {
        let of = |http_threads| max_idle(64, http_threads, 1);
        assert_eq!(of(None), 2);
        assert_eq!((of(Some(1)), of(Some(6)), of(Some(500))), (0, 3, 64));
        assert_eq!(of(ON_DEMAND), 64);
    }

    #[test]
    fn as_many_connections_are_kept_as_are_in_use() {
        let of = |http_threads, in_use| max_idle(64, http_threads, in_use);
        assert_eq!(of(Some(u32::MAX), 3000), 3000);
        assert_eq!((of(ON_DEMAND, 300), of(ON_DEMAND, 900), of(ON_DEMAND, 3000)), (300, 124, 64));
        assert_eq!((of(Some(6), 3000), of(None, 3000)), (3, 2));
        assert_eq!(max_idle(0, ON_DEMAND, 300), 0);
    }
}
