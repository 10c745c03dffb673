//! State of a request body: how much was sent, and why it failed. Readable while a connection owns the body.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use warden_policies::health::AnswerKeys;
use warden_policies::quarantine::RequestFingerprint;

use crate::refusal::BodyError;

#[derive(Debug, Default)]
pub(crate) struct SentBody {
    /// True if the whole body arrived before a backend was requested.
    arrived: AtomicBool,
    whole: AtomicBool,
    fault: OnceLock<BodyError>,
    pub(crate) bytes: AtomicU64,
    images: AtomicU32,
    audio: AtomicU32,
    print: OnceLock<RequestFingerprint>,
    conversation: OnceLock<u64>,
    /// True if the request asks for one token at most, or has stop words.
    may_be_empty: AtomicBool,
}

impl SentBody {
    pub(crate) fn for_resend(before: &Self) -> Self {
        Self {
            bytes: AtomicU64::new(before.bytes.load(Ordering::Relaxed)),
            images: AtomicU32::new(before.images.load(Ordering::Relaxed)),
            audio: AtomicU32::new(before.audio.load(Ordering::Relaxed)),
            print: before.print.clone(),
            conversation: before.conversation.clone(),
            may_be_empty: AtomicBool::new(before.may_be_empty()),
            ..Self::default()
        }
    }

    pub(crate) fn note_media(&self, images: u32, audio: u32) {
        self.images.store(images, Ordering::Relaxed);
        self.audio.store(audio, Ordering::Relaxed);
    }

    pub(crate) fn media(&self) -> (u64, u64) {
        (u64::from(self.images.load(Ordering::Relaxed)), u64::from(self.audio.load(Ordering::Relaxed)))
    }

    pub(crate) fn set_fingerprint(&self, print: RequestFingerprint) {
        // The body ends only once, so a second value cannot differ.
        let _once = self.print.set(print);
    }

    /// Returns the fingerprint once the whole body has arrived; `None` for an empty body.
    pub(crate) fn fingerprint(&self) -> Option<RequestFingerprint> {
        self.print.get().copied()
    }

    pub(crate) fn set_conversation(&self, key: Option<u64>) {
        if let Some(key) = key {
            let _once = self.conversation.set(key);
        }
    }

    pub(crate) fn note_may_be_empty(&self) {
        self.may_be_empty.store(true, Ordering::Relaxed);
    }

    /// Returns true if a sound answer may have no text, as far as known.
    pub(crate) fn may_be_empty(&self) -> bool {
        self.may_be_empty.load(Ordering::Relaxed)
    }

    /// Returns the keys of the conversation and the request, if they were computed.
    pub(crate) fn answer_keys(&self) -> AnswerKeys {
        let mut hasher = DefaultHasher::new();
        let request = self.fingerprint().map(|print| {
            print.0.hash(&mut hasher);
            hasher.finish()
        });
        AnswerKeys { conversation: self.conversation.get().copied(), request }
    }

    pub(crate) fn note_end(&self, whole: bool) {
        self.whole.store(whole, Ordering::Release);
    }

    pub(crate) fn note_fault(&self, fault: BodyError) {
        let _once = self.fault.set(fault);
    }

    pub(crate) fn note_arrival(&self) {
        self.arrived.store(true, Ordering::Relaxed);
    }

    pub(crate) fn has_arrived(&self) -> bool {
        self.arrived.load(Ordering::Relaxed)
    }

    /// Returns whether the connection took the whole body.
    pub(crate) fn is_whole(&self) -> bool {
        self.whole.load(Ordering::Acquire)
    }

    /// Returns the fingerprint once the backend may work on the request: it took the whole body.
    pub(crate) fn sent_fingerprint(&self) -> Option<RequestFingerprint> {
        if self.is_whole() { self.fingerprint() } else { None }
    }

    pub(crate) fn fault(&self) -> Option<BodyError> {
        self.fault.get().copied()
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
