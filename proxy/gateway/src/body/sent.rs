//! What became of a request's body, readable while a connection owns it.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};

use warden_policies::quarantine::Fingerprint;

use crate::refusal::BodyFault;

/// What became of the body, readable while a connection owns it.
#[derive(Debug, Default)]
pub(crate) struct Sent {
    whole: AtomicBool,
    fault: AtomicU8,
    pub(crate) bytes: AtomicU64,
    images: AtomicU32,
    audio: AtomicU32,
    print: OnceLock<Fingerprint>,
}

impl Sent {
    /// For the same body sent once more.
    pub(crate) fn again(before: &Self) -> Self {
        Self {
            bytes: AtomicU64::new(before.bytes.load(Ordering::Relaxed)),
            images: AtomicU32::new(before.images.load(Ordering::Relaxed)),
            audio: AtomicU32::new(before.audio.load(Ordering::Relaxed)),
            print: before.print.clone(),
            ..Self::default()
        }
    }

    /// What was seen in the body so far: images, audio clips.
    pub(crate) fn note_media(&self, images: u32, audio: u32) {
        self.images.store(images, Ordering::Relaxed);
        self.audio.store(audio, Ordering::Relaxed);
    }

    /// Images and audio clips seen in the body.
    pub(crate) fn media(&self) -> (u64, u64) {
        (u64::from(self.images.load(Ordering::Relaxed)), u64::from(self.audio.load(Ordering::Relaxed)))
    }

    /// All of the client's body has come, and this is what it is known by.
    pub(crate) fn seal(&self, print: Fingerprint) {
        // It ends once.
        let _once = self.print.set(print);
    }

    /// What the body is known by, once all of it has come; `None` for an empty one.
    pub(crate) fn print(&self) -> Option<Fingerprint> {
        self.print.get().copied()
    }

    /// The connection has taken the body to its end, or, with a fault, as far as it came.
    pub(crate) fn note_end(&self, whole: bool) {
        self.whole.store(whole, Ordering::Release);
    }

    /// Why it ends early.
    pub(crate) fn note_fault(&self, fault: BodyFault) {
        self.fault.store(fault as u8, Ordering::Release);
    }

    /// Whether the connection took the body to its end.
    pub(crate) fn is_whole(&self) -> bool {
        self.whole.load(Ordering::Acquire)
    }

    /// What the body is known by, if the connection took all of it: only then can the backend be at work on it.
    pub(crate) fn whole_print(&self) -> Option<Fingerprint> {
        self.print().filter(|_| self.is_whole())
    }

    /// Why it ended early, if it did.
    pub(crate) fn fault(&self) -> Option<BodyFault> {
        match self.fault.load(Ordering::Acquire) {
            1 => Some(BodyFault::TooLarge),
            2 => Some(BodyFault::TooSlow),
            3 => Some(BodyFault::Broken),
            4 => Some(BodyFault::TwoModels),
            5 => Some(BodyFault::Quarantined),
            6 => Some(BodyFault::Stopped),
            7 => Some(BodyFault::Undecodable),
            8 => Some(BodyFault::TooDense),
            _ => None,
        }
    }
}

impl warden_supervisor::Asked for Sent {
    fn is_whole(&self) -> bool {
        Self::is_whole(self)
    }

    fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    fn media(&self) -> u64 {
        let (images, audio) = Self::media(self);
        images + audio
    }

    fn print(&self) -> Option<Fingerprint> {
        Self::print(self)
    }
}
