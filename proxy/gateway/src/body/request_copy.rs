//! Copies a request's body for a recorder, if the operator enabled recording for the model. Copies pieces
//! while they are passed on, never waits, and drops a body that is too large.

use std::fmt::Debug;
use std::sync::Arc;

use bytes::Bytes;
use http::Method;

use crate::body::budget::PIECE_OVERHEAD;

/// Receives copies of one model's requests.
pub trait BodyRecorder: Debug + Send + Sync {
    /// Maximum size of a recorded body, in bytes.
    fn limit(&self) -> usize;
    /// Receives a whole body as sent to the backend; `id` is the request's `X-Request-Id`. Must not block,
    /// because a thread that serves clients calls it.
    fn take(&self, id: &str, method: &Method, path: &str, body: Vec<Bytes>);
}

#[derive(Debug)]
pub(crate) struct RequestCopy {
    recorder: Arc<dyn BodyRecorder>,
    id: String,
    method: Method,
    path: String,
    pieces: Vec<Bytes>,
    /// Number of bytes that may still be added.
    left: usize,
}

impl RequestCopy {
    pub(crate) fn new(recorder: Arc<dyn BodyRecorder>, id: &str, method: &Method, path: &str) -> Self {
        let left = recorder.limit();
        Self {
            recorder,
            id: id.to_owned(),
            method: method.clone(),
            path: path.to_owned(),
            pieces: Vec::new(),
            left,
        }
    }

    /// Adds the next piece; returns false once the body is too large to be recorded.
    pub(crate) fn add(&mut self, piece: &Bytes) -> bool {
        // Without the overhead, pieces of one byte would take a hundred times the counted bytes.
        let cost = piece.len().saturating_add(PIECE_OVERHEAD);
        let fits = cost <= self.left;
        if fits {
            self.left -= cost;
            self.pieces.push(piece.clone());
        }
        fits
    }

    /// Gives the copy to the recorder once the whole body was sent.
    pub(crate) fn end(self) {
        self.recorder.take(&self.id, &self.method, &self.path, self.pieces);
    }
}
