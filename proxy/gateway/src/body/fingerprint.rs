//! Fingerprints of requests: a keyed hash, computed while the body is passed on, so that no body is held for
//! it. The key is random for each process, so a fingerprint reveals nothing about its request.
//!
//! Two requests are the same if method, path and decoded body, as sent by the client, are equal.
//!
//! `HighwayHash` reads the first 64 KiB of the body, and a 128-bit XXH3 hash of the rest. XXH3 is five times
//! as fast: `HighwayHash` alone took a fifth of the time of passing on a body of some MB. XXH3 is keyed with
//! another secret and its result is never shown, so no client can construct two bodies with the same
//! fingerprint.

use std::fmt;
use std::sync::Arc;

use highway::{HighwayHash, HighwayHasher, Key};
use http::Method;
use twox_hash::xxhash3_128::{DEFAULT_SECRET_LENGTH, RawHasher, SecretBuffer};
use warden_policies::quarantine::RequestFingerprint;

/// Number of bytes of a body that `HighwayHash` reads directly.
const DIRECT_BYTES: usize = 64 * 1024;

type XxhSecret = [u8; DEFAULT_SECRET_LENGTH];

type XxhHasher = RawHasher<XxhSecret>;

/// Bytes that XXH3 reads before the body: it ignores its secret for inputs of fewer than 241 bytes.
type XxhLead = [u8; 256];

#[derive(Clone)]
pub(crate) struct FingerprintKey {
    key: [u64; 4],
    /// XXH3 state after its lead. `None` only if XXH3 refuses the length of its secret, which is fixed.
    xxh3: Option<Arc<XxhHasher>>,
}

impl FingerprintKey {
    pub(crate) fn new() -> Self {
        Self::from_parts(rand::random(), rand::random(), &rand::random())
    }

    fn from_parts(key: [u64; 4], secret: XxhSecret, lead: &XxhLead) -> Self {
        let behind_its_lead = |secret| {
            let mut xxh3 = RawHasher::new(secret);
            xxh3.write(lead);
            Arc::new(xxh3)
        };
        Self { key, xxh3: SecretBuffer::new(0, secret).ok().map(behind_its_lead) }
    }

    pub(crate) fn begin(&self, method: &Method, path: &str) -> FingerprintHasher {
        let mut highway = HighwayHasher::new(Key(self.key));
        highway.append(method.as_str().as_bytes());
        highway.append(path.as_bytes());
        // Neither method nor path contains a zero byte, so the zero separates path and body unambiguously.
        highway.append(&[0]);
        FingerprintHasher {
            highway,
            read: 0,
            rest: self.xxh3.clone().map_or(RestHasher::Unavailable, RestHasher::None),
        }
    }
}

/// Size of a part that stays in the CPU cache between two readings.
const CACHE_BYTES: usize = 16 * 1024;

/// Cuts a piece into parts that stay in the cache between the scanner and the fingerprint hasher.
pub(crate) fn cache_sized_parts(piece: &[u8]) -> impl Iterator<Item = &[u8]> {
    piece.chunks(CACHE_BYTES)
}

pub(crate) struct FingerprintHasher {
    highway: HighwayHasher,
    /// Number of bytes that `highway` has read: at most `DIRECT_BYTES`, unless XXH3 is unavailable.
    read: usize,
    rest: RestHasher,
}

/// Hash of the bytes after the first `DIRECT_BYTES`.
enum RestHasher {
    None(Arc<XxhHasher>),
    /// XXH3, boxed because few bodies are that long.
    Long(Box<XxhHasher>),
    /// XXH3 is unavailable: `HighwayHash` reads everything.
    Unavailable,
}

impl fmt::Debug for FingerprintHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The state would reveal the key.
        f.debug_struct("FingerprintHasher").finish_non_exhaustive()
    }
}

impl FingerprintHasher {
    pub(crate) fn add(&mut self, piece: &[u8]) {
        let (first, behind) = piece.split_at(piece.len().min(DIRECT_BYTES.saturating_sub(self.read)));
        self.highway.append(first);
        self.read += first.len();
        if behind.is_empty() {
            return;
        }
        if let RestHasher::None(xxh3) = &self.rest {
            self.rest = RestHasher::Long(Box::new(XxhHasher::clone(xxh3)));
        }
        match &mut self.rest {
            RestHasher::Long(xxh3) => xxh3.write(behind),
            RestHasher::None(_) | RestHasher::Unavailable => self.highway.append(behind),
        }
    }

    pub(crate) fn finish(&self) -> RequestFingerprint {
        // Finish a copy, because more pieces may follow.
        let mut highway = self.highway.clone();
        if let RestHasher::Long(xxh3) = &self.rest {
            highway.append(&xxh3.finish_128().to_le_bytes());
        }
        let [low, high] = highway.finalize128();
        RequestFingerprint(u128::from(high) << 64 | u128::from(low))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: XxhSecret = [7; DEFAULT_SECRET_LENGTH];

    fn key() -> FingerprintKey {
        FingerprintKey::from_parts([1, 2, 3, 4], SECRET, &[9; 256])
    }

    fn of(key: &FingerprintKey, method: &Method, path: &str, pieces: &[&[u8]]) -> RequestFingerprint {
        let mut printer = key.begin(method, path);
        for piece in pieces {
            printer.add(piece);
        }
        printer.finish()
    }

    #[test]
    fn the_same_request_is_known_in_whatever_pieces_it_comes_and_no_other_is_taken_for_it() {
        let key = key();
        let post = |path, pieces: &[&[u8]]| of(&key, &Method::POST, path, pieces);
        let body = b"{\"prompt\":\"a long one\"}";
        let whole = post("/v1/chat/completions", &[body]);
        for cut in 0..body.len() {
            let (one, two) = body.split_at(cut);
            assert_eq!(post("/v1/chat/completions", &[one, b"", two]), whole, "{cut}");
        }
        assert_ne!(post("/v1/completions", &[body]), whole);
        assert_ne!(post("/a", &[b"b"]), post("/ab", &[b""]));
        assert_ne!(of(&key, &Method::PUT, "/a", &[b"b"]), post("/a", &[b"b"]));
        let other = FingerprintKey::from_parts([1, 2, 3, 5], SECRET, &[9; 256]);
        assert_ne!(of(&other, &Method::POST, "/a", &[b"b"]), post("/a", &[b"b"]), "another key");
    }

    #[test]
    fn a_long_body_too_and_a_change_of_any_byte_of_it() {
        let key = key();
        assert!(key.xxh3.is_some(), "what lies behind the first bytes is read by XXH3");
        let post = |pieces: &[&[u8]]| of(&key, &Method::POST, "/", pieces);
        let body: Vec<u8> = (0..=250).cycle().take(DIRECT_BYTES + 5000).collect();
        let whole = post(&[&body]);
        for cut in
            [1, DIRECT_BYTES - 1, DIRECT_BYTES, DIRECT_BYTES + 1, DIRECT_BYTES + 240, DIRECT_BYTES + 4999]
        {
            let (one, two) = body.split_at(cut);
            assert_eq!(post(&[one, two]), whole, "{cut}");
        }
        for at in (0..body.len()).step_by(977).chain(DIRECT_BYTES - 2..DIRECT_BYTES + 300) {
            let mut other = body.clone();
            other[at] ^= 1;
            assert_ne!(post(&[&other]), whole, "{at}");
        }
        for len in [DIRECT_BYTES - 1, DIRECT_BYTES, DIRECT_BYTES + 1, DIRECT_BYTES + 4999] {
            assert_ne!(post(&[&body[..len]]), whole, "{len}");
        }
        let other = FingerprintKey::from_parts([1, 2, 3, 4], [8; DEFAULT_SECRET_LENGTH], &[9; 256]);
        assert_ne!(of(&other, &Method::POST, "/", &[&body]), whole, "another secret");
    }

    #[test]
    fn two_keys_are_never_alike() {
        let print = |key: FingerprintKey| of(&key, &Method::POST, "/", &[b"body"]);
        assert_ne!(print(FingerprintKey::new()), print(FingerprintKey::new()));
    }
}
