//! Shared state of a request body: how much was sent and why it failed. Readable while a connection owns the
//! body.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};

use warden_policies::quarantine::RequestFingerprint;

use crate::refusal::BodyError;

/// State of a request body, shared with the connection that sends it.
#[derive(Debug, Default)]
pub(crate) struct SentBody {
    whole: AtomicBool,
    fault: AtomicU8,
    pub(crate) bytes: AtomicU64,
    images: AtomicU32,
    audio: AtomicU32,
    print: OnceLock<RequestFingerprint>,
}

impl SentBody {
    /// Creates the state for sending the same body again.
    pub(crate) fn for_resend(before: &Self) -> Self {
        Self {
            bytes: AtomicU64::new(before.bytes.load(Ordering::Relaxed)),
            images: AtomicU32::new(before.images.load(Ordering::Relaxed)),
            audio: AtomicU32::new(before.audio.load(Ordering::Relaxed)),
            print: before.print.clone(),
            ..Self::default()
        }
    }

    /// Records the images and audio clips seen so far.
    pub(crate) fn note_media(&self, images: u32, audio: u32) {
        self.images.store(images, Ordering::Relaxed);
        self.audio.store(audio, Ordering::Relaxed);
    }

    /// Returns the images and audio clips seen in the body.
    pub(crate) fn media(&self) -> (u64, u64) {
        (u64::from(self.images.load(Ordering::Relaxed)), u64::from(self.audio.load(Ordering::Relaxed)))
    }

    /// Sets the fingerprint, once the client's whole body has arrived.
    pub(crate) fn set_fingerprint(&self, print: RequestFingerprint) {
        // The body ends only once, so a second value cannot differ.
        let _once = self.print.set(print);
    }

    /// Returns the fingerprint, once the whole body has arrived; `None` for an empty body.
    pub(crate) fn fingerprint(&self) -> Option<RequestFingerprint> {
        self.print.get().copied()
    }

    /// Records whether the connection took the whole body.
    pub(crate) fn note_end(&self, whole: bool) {
        self.whole.store(whole, Ordering::Release);
    }

    /// Records why the body ends early.
    pub(crate) fn note_fault(&self, fault: BodyError) {
        self.fault.store(fault as u8, Ordering::Release);
    }

    /// Returns whether the connection took the whole body.
    pub(crate) fn is_whole(&self) -> bool {
        self.whole.load(Ordering::Acquire)
    }

    /// Returns the fingerprint, if the connection took the whole body: before that, the backend cannot be
    /// working on the request.
    pub(crate) fn sent_fingerprint(&self) -> Option<RequestFingerprint> {
        self.fingerprint().filter(|_| self.is_whole())
    }

    /// Returns why the body ended early, if it did.
    pub(crate) fn fault(&self) -> Option<BodyError> {
        match self.fault.load(Ordering::Acquire) {
            1 => Some(BodyError::TooLarge),
            2 => Some(BodyError::TooSlow),
            3 => Some(BodyError::Broken),
            4 => Some(BodyError::TwoModels),
            5 => Some(BodyError::Quarantined),
            6 => Some(BodyError::Stopped),
            7 => Some(BodyError::Undecodable),
            8 => Some(BodyError::TooDense),
            _ => None,
        }
    }
}

impl warden_supervisor::SentRequest for SentBody {
    fn is_whole(&self) -> bool {
        Self::is_whole(self)
    }

    fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    fn media_count(&self) -> u64 {
        let (images, audio) = Self::media(self);
        images + audio
    }

    fn fingerprint(&self) -> Option<RequestFingerprint> {
        Self::fingerprint(self)
    }
}
