//! Copies a request's body for a recorder, if the operator enabled recording for the model. The copy takes
//! pieces while they are passed on, never waits, and drops a body larger than the limit. The recorder
//! decides what is stored.

use std::fmt::Debug;
use std::sync::Arc;

use bytes::Bytes;
use http::Method;

/// Receives copies of one model's requests.
pub trait BodyRecorder: Debug + Send + Sync {
    /// Size limit of a body in bytes; a larger body is not recorded.
    fn limit(&self) -> usize;
    /// Receives a whole body as it was sent to the backend; `id` is the request's `X-Request-Id`. Called on
    /// a thread that serves clients, so it must not block.
    fn take(&self, id: &str, method: &Method, path: &str, body: Vec<Bytes>);
}

/// Memory for a held piece in bytes, apart from its content.
const PIECE_OVERHEAD: usize = 64;

#[derive(Debug)]
pub(crate) struct RequestCopy {
    recorder: Arc<dyn BodyRecorder>,
    id: String,
    method: Method,
    path: String,
    pieces: Vec<Bytes>,
    /// Bytes that may still be added.
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

    /// Adds the next piece; returns false if the body has become too large to be recorded.
    pub(crate) fn add(&mut self, piece: &Bytes) -> bool {
        // If the overhead were not counted, pieces of one byte would take a hundred times the counted bytes.
        let cost = piece.len().saturating_add(PIECE_OVERHEAD);
        let fits = cost <= self.left;
        if fits {
            self.left -= cost;
            self.pieces.push(piece.clone());
        }
        fits
    }

    /// Hands the copy to the recorder once the whole body was sent to the backend.
    pub(crate) fn end(self) {
        self.recorder.take(&self.id, &self.method, &self.path, self.pieces);
    }
}
