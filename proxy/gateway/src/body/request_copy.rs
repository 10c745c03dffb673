//! A copy of a request's body for whoever records requests, where the operator wants that of a model. It takes pieces as
//! they pass, never waits, and gives up a body that is larger than wanted; what is recorded and how is not decided here.

use std::fmt::Debug;
use std::sync::Arc;

use bytes::Bytes;
use http::Method;

/// Takes copies of requests of one model.
pub trait Recorder: Debug + Send + Sync {
    /// Bytes of a body at most; a larger one is not recorded.
    fn limit(&self) -> usize;
    /// A whole body as it goes to the backend, of the request with this `X-Request-Id`. Called on a thread that serves clients: it must not block.
    fn take(&self, id: &str, method: &Method, path: &str, body: Vec<Bytes>);
}

/// Bytes that holding a piece costs beside its own.
const PIECE: usize = 64;

#[derive(Debug)]
pub(crate) struct RequestCopy {
    recorder: Arc<dyn Recorder>,
    id: String,
    method: Method,
    path: String,
    pieces: Vec<Bytes>,
    /// Bytes that may still come.
    left: usize,
}

impl RequestCopy {
    pub(crate) fn new(recorder: Arc<dyn Recorder>, id: &str, method: &Method, path: &str) -> Self {
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

    /// A piece passes; false if the body has become too large to be recorded.
    pub(crate) fn add(&mut self, piece: &Bytes) -> bool {
        // Pieces of one byte would cost a hundred times what they hold.
        let cost = piece.len().saturating_add(PIECE);
        let fits = cost <= self.left;
        if fits {
            self.left -= cost;
            self.pieces.push(piece.clone());
        }
        fits
    }

    /// The body has passed to its end.
    pub(crate) fn end(self) {
        self.recorder.take(&self.id, &self.method, &self.path, self.pieces);
    }
}
