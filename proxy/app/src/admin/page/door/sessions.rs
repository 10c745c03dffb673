//! Who is signed in on the public listener: bounded, gone with the instance, each for some hours. What a browser keeps is random and
//! known here by its hash only, so that comparing takes the same time however near a guess is.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;
use warden_gateway::KeyHash;

use crate::sync::lock;

/// Sessions at a time. Whoever signs in beyond that ends the oldest: only holders of a key get so far.
const MOST: usize = 64;
/// A session ends after so long, whatever happens in it: a working day and what is left of it.
pub(super) const LASTS: Duration = Duration::from_secs(12 * 3600);
/// Bytes of what a browser keeps: nobody guesses 256 bits.
const BYTES: usize = 32;

#[derive(Debug)]
struct Session {
    /// Of what the browser keeps.
    hash: KeyHash,
    /// The key that opened it. It is asked for each time whether that still has the right.
    key: KeyHash,
    until: Instant,
}

/// All of them, the oldest first.
#[derive(Debug, Default)]
pub(super) struct Sessions(Mutex<VecDeque<Session>>);

impl Sessions {
    /// Opens one by a key that has the right. Returns what the browser is to keep.
    pub(super) fn open(&self, key: KeyHash, now: Instant) -> String {
        let secret = hex::encode(rand::random::<[u8; BYTES]>());
        let mut all = lock(&self.0);
        all.retain(|session| session.until > now);
        while all.len() >= MOST {
            all.pop_front();
        }
        all.push_back(Session { hash: KeyHash::of(secret.as_bytes()), key, until: now + LASTS });
        secret
    }

    /// The key of the session that a browser keeps this of.
    pub(super) fn key(&self, secret: &str, now: Instant) -> Option<KeyHash> {
        let hash = KeyHash::of(secret.as_bytes());
        let all = lock(&self.0);
        all.iter().find(|session| session.hash == hash && session.until > now).map(|session| session.key)
    }

    /// Ends one.
    pub(super) fn close(&self, secret: &str) {
        let hash = KeyHash::of(secret.as_bytes());
        lock(&self.0).retain(|session| session.hash != hash);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_is_known_until_it_is_closed_or_old_and_there_are_few() {
        let (sessions, key) = (Sessions::default(), KeyHash::of(b"key"));
        let now = Instant::now();
        let (one, two) = (sessions.open(key, now), sessions.open(key, now));
        assert!(one != two && sessions.key(&one, now) == Some(key));
        for wrong in ["", &one[1..], &one.to_uppercase(), &hex::encode(key.to_hex())] {
            assert_eq!(sessions.key(wrong, now), None, "{wrong}");
        }
        sessions.close(&one);
        assert_eq!((sessions.key(&one, now), sessions.key(&two, now)), (None, Some(key)));
        assert_eq!(sessions.key(&two, now + LASTS), None);
        for _ in 0..MOST {
            sessions.open(key, now);
        }
        assert_eq!((sessions.key(&two, now), lock(&sessions.0).len()), (None, MOST));
        let last = sessions.open(key, now + LASTS);
        assert_eq!((sessions.key(&last, now + LASTS), lock(&sessions.0).len()), (Some(key), 1));
    }
}
