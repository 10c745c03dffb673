//! The path to a backend: leases, connections, attempts.

pub(crate) mod again;
pub(crate) mod attempt;
pub(crate) mod attempts;
pub(crate) mod backends;
pub(crate) mod conn_waker;
pub(crate) mod httplib;
pub(crate) mod message;
pub(crate) mod pool;
pub(crate) mod request_body;
mod tried;
pub(crate) mod upstream_conn;

pub(crate) use self::again::RepeatableRequest;
use self::attempt::AttemptFailure;
pub(crate) use self::attempt::{
    AnsweringBackend, AttemptAnswer, RelayedAnswer, attempt_once, connect_to_generation,
};
pub(crate) use self::attempts::{BackendAttempts, BackendSearch};
pub(crate) use self::backends::{
    BackendLease, BoxFuture, LeaseDemand, LeaseMode, LeaseProvider, SharedLease,
};
use self::conn_waker::ConnWaker;
use self::httplib::ends_connection;
pub(crate) use self::httplib::{
    check_lines, check_request_line, close_after_unread_body, is_sent_without_body,
};
pub(crate) use self::message::{RepeatPolicy, UpstreamRequest};
pub(crate) use self::pool::{ConnectionPool, UpstreamContext};
pub(crate) use self::request_body::RequestBody;
use self::request_body::{BodyCheckpoint, join_others_later};
use self::tried::{CANARY_BROKE, CANARY_STOPPED, CanaryAttempt};
pub(crate) use self::upstream_conn::{IncompleteAnswer, UpstreamConn, UpstreamSendError};
