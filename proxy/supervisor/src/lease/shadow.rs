//! Copies of requests that were answered, for a build that is tried and answers nobody. Offered where the answer is whole, so that no
//! client waits for it; what does not fit is dropped.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bytes::Bytes;
use tokio::sync::mpsc;

use crate::lease::turns::Turn;
use crate::process::touch::Said;
use crate::sync::lock;

/// A request that was answered.
#[derive(Debug)]
pub(crate) struct Copied {
    /// The path that it went to.
    pub(crate) path: String,
    /// Its body as it went to the backend.
    pub(crate) body: Bytes,
    /// Its answer.
    pub(crate) said: Said,
}

/// Who wants copies of one model's requests.
#[derive(Debug, Default)]
pub(crate) struct Shadow {
    /// Somebody does, so that nobody makes one where that is not so.
    is_on: AtomicBool,
    sender: Mutex<Option<mpsc::Sender<Copied>>>,
    /// The largest that is copied, in bytes.
    most: AtomicU64,
    /// Those that were not, so far.
    dropped: AtomicU64,
}

impl Shadow {
    /// From now on copies go there, those of at most so many bytes.
    pub(crate) fn set(&self, sender: mpsc::Sender<Copied>, most: u64) {
        let mut current = lock(&self.sender);
        *current = Some(sender);
        self.most.store(most, Ordering::Relaxed);
        self.is_on.store(true, Ordering::Relaxed);
    }

    /// No copies go there any more, unless somebody else wants them by now.
    pub(crate) fn unset(&self, sender: &mpsc::Sender<Copied>) {
        let mut current = lock(&self.sender);
        if current.as_ref().is_some_and(|current| current.same_channel(sender)) {
            *current = None;
            self.is_on.store(false, Ordering::Relaxed);
        }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    /// Copies a request if there is room for it now.
    pub(crate) fn offer(&self, turn: &Turn) {
        if !self.is_on() {
            return;
        }
        let most = self.most.load(Ordering::Relaxed);
        let fits = |bytes: usize| bytes as u64 <= most;
        let body = turn.body.as_ref().filter(|body| fits(body.len()) && fits(turn.said.bytes()));
        let sender = lock(&self.sender).clone();
        let taken = match (body, sender) {
            (Some(body), Some(sender)) => {
                // A place first, so that nothing is copied for one that has none.
                sender.try_reserve().is_ok_and(|place| {
                    // A copy of its own: what came may be a part of a larger buffer.
                    let body = Bytes::copy_from_slice(body);
                    place.send(Copied { path: turn.path.clone(), body, said: turn.said.clone() });
                    true
                })
            }
            _ => false,
        };
        if !taken {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Those that were not copied since the last call.
    pub(crate) fn take_dropped(&self) -> u64 {
        self.dropped.swap(0, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(body: Option<&'static str>) -> Turn {
        let body = body.map(|body| Bytes::from_static(body.as_bytes()));
        let path = "/v1/chat/completions".to_owned();
        Turn {
            path,
            body,
            said: Said::Text("ok".to_owned()),
            prompt: 1,
            tokens: 9,
            has_media: false,
            prefill: None,
        }
    }

    #[test]
    fn what_nobody_wants_is_not_copied_and_what_does_not_fit_is_counted() {
        let shadow = Shadow::default();
        shadow.offer(&turn(Some("{}")));
        assert_eq!(shadow.take_dropped(), 0, "nobody wants it");
        let (sender, mut receiver) = mpsc::channel(1);
        shadow.set(sender.clone(), 4);
        for body in [Some("{}"), Some("[]"), Some("{ \"too\": \"large\" }"), None] {
            shadow.offer(&turn(body));
        }
        assert_eq!(receiver.try_recv().unwrap().body, "{}");
        assert_eq!(shadow.take_dropped(), 3, "one is behind another, one too large, one has no body");
        assert_eq!(shadow.take_dropped(), 0);
        // Who leaves late takes nothing from who has come meanwhile.
        let (next, mut others) = mpsc::channel(1);
        shadow.set(next.clone(), 4);
        shadow.unset(&sender);
        shadow.offer(&turn(Some("{}")));
        assert!(others.try_recv().is_ok() && receiver.try_recv().is_err());
        shadow.unset(&next);
        shadow.offer(&turn(Some("{}")));
        assert!(others.try_recv().is_err() && !shadow.is_on());
    }
}
