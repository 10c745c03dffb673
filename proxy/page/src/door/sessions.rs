//! Sessions of signed-in browsers. Their number is bounded, each is valid for some hours, and all are lost
//! when the instance ends. The cookie is random and only its hash is kept, so that a comparison takes the
//! same time however close a guess is.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;
use warden_gateway::KeyHash;
use warden_supervisor::sync::lock;

/// Most sessions. A further sign-in, which needs a key, ends the oldest session.
const MAX_SESSIONS: usize = 64;
/// Lifetime of a session, even if it is in use: somewhat more than a working day.
pub(super) const SESSION_LIFETIME: Duration = Duration::from_secs(12 * 3600);
/// Length of the cookie in bytes: 256 bits cannot be guessed.
const COOKIE_BYTES: usize = 32;

#[derive(Debug)]
struct PageSession {
    hash: KeyHash,
    /// The key that opened the session. Each request checks that the key may still open the page.
    key: KeyHash,
    until: Instant,
}

/// The sessions, oldest first.
#[derive(Debug, Default)]
pub(super) struct PageSessions(Mutex<VecDeque<PageSession>>);

impl PageSessions {
    /// Opens a session for a key that has the right to open the page. Returns the cookie.
    pub(super) fn open(&self, key: KeyHash, now: Instant) -> String {
        let secret = hex::encode(rand::random::<[u8; COOKIE_BYTES]>());
        let mut all = lock(&self.0);
        all.retain(|session| session.until > now);
        while all.len() >= MAX_SESSIONS {
            all.pop_front();
        }
        all.push_back(PageSession {
            hash: KeyHash::from_key(secret.as_bytes()),
            key,
            until: now + SESSION_LIFETIME,
        });
        secret
    }

    pub(super) fn key(&self, secret: &str, now: Instant) -> Option<KeyHash> {
        let hash = KeyHash::from_key(secret.as_bytes());
        let all = lock(&self.0);
        all.iter().find(|session| session.hash == hash && session.until > now).map(|session| session.key)
    }

    pub(super) fn close(&self, secret: &str) {
        let hash = KeyHash::from_key(secret.as_bytes());
        lock(&self.0).retain(|session| session.hash != hash);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_is_known_until_it_is_closed_or_old_and_there_are_few() {
        let (sessions, key) = (PageSessions::default(), KeyHash::from_key(b"key"));
        let now = Instant::now();
        let (one, two) = (sessions.open(key, now), sessions.open(key, now));
        assert!(one != two && sessions.key(&one, now) == Some(key));
        for wrong in ["", &one[1..], &one.to_uppercase(), &hex::encode(key.to_hex())] {
            assert_eq!(sessions.key(wrong, now), None, "{wrong}");
        }
        sessions.close(&one);
        assert_eq!((sessions.key(&one, now), sessions.key(&two, now)), (None, Some(key)));
        assert_eq!(sessions.key(&two, now + SESSION_LIFETIME), None);
        for _ in 0..MAX_SESSIONS {
            sessions.open(key, now);
        }
        assert_eq!((sessions.key(&two, now), lock(&sessions.0).len()), (None, MAX_SESSIONS));
        let last = sessions.open(key, now + SESSION_LIFETIME);
        assert_eq!((sessions.key(&last, now + SESSION_LIFETIME), lock(&sessions.0).len()), (Some(key), 1));
    }
}
