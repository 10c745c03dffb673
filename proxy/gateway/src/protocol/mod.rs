//! Duties of an HTTP intermediary; reads and writes heads, fields, targets and events. Knows no models.

pub(crate) mod conn_state;
pub(crate) mod headers;
pub(crate) mod query;
pub(crate) mod raw_head;
pub(crate) mod sse;
pub(crate) mod wire;

/// Smallest buffer that hyper accepts, in bytes.
pub(crate) const LEAST_BUFFER: usize = 8192;

pub(crate) use self::conn_state::{AnswerReadAhead, ConnBusy, ConnPhase, ConnState};
pub(crate) use self::headers::{CONVERSATION, CONVERSATION_ID, EXECUTED, fresh_request_id};
use self::raw_head::{BodyFraming, RawHeadReader};
pub(crate) use self::raw_head::{HeadResult, WireError};
pub(crate) use self::sse::EventSplitter;
