//! Fingerprints of requests: a hash under a key that is drawn anew for each instance, fed as a body passes, so that no
//! body is held for it. Who does not know the key learns nothing of a request by its fingerprint.
//!
//! What counts as the same request: the same method, path and bytes of body, as the client sent them.

use highway::{HighwayHash, HighwayHasher, Key};
use http::Method;
use warden_policies::quarantine::Fingerprint;

/// The key of an instance.
#[derive(Clone, Copy)]
pub(crate) struct PrintKey([u64; 4]);

impl PrintKey {
    /// A new one.
    pub(crate) fn new() -> Self {
        Self(rand::random())
    }

    /// The beginning of a request's fingerprint.
    pub(crate) fn begin(self, method: &Method, path: &str) -> Printer {
        let mut hasher = HighwayHasher::new(Key(self.0));
        hasher.append(method.as_str().as_bytes());
        hasher.append(path.as_bytes());
        // Neither has a zero byte, so no path can be taken for the beginning of a body.
        hasher.append(&[0]);
        Printer { hasher }
    }
}

/// A fingerprint in the making.
#[derive(Clone, Debug)]
pub(crate) struct Printer {
    hasher: HighwayHasher,
}

impl Printer {
    /// The next piece of the body.
    pub(crate) fn add(&mut self, piece: &[u8]) {
        self.hasher.append(piece);
    }

    /// The fingerprint of all that was added.
    pub(crate) fn finish(&self) -> Fingerprint {
        // A copy ends: more may be added to this one.
        let [low, high] = self.hasher.clone().finalize128();
        Fingerprint(u128::from(high) << 64 | u128::from(low))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(key: PrintKey, method: &Method, path: &str, pieces: &[&str]) -> Fingerprint {
        let mut printer = key.begin(method, path);
        for piece in pieces {
            printer.add(piece.as_bytes());
        }
        printer.finish()
    }

    #[test]
    fn the_same_request_is_known_in_whatever_pieces_it_comes_and_no_other_is_taken_for_it() {
        let key = PrintKey([1, 2, 3, 4]);
        let post = |path, pieces: &[&str]| of(key, &Method::POST, path, pieces);
        let whole = post("/v1/chat/completions", &["{\"prompt\":\"a long one\"}"]);
        for cut in 0..22 {
            let (one, two) = "{\"prompt\":\"a long one\"}".split_at(cut);
            assert_eq!(post("/v1/chat/completions", &[one, "", two]), whole, "{cut}");
        }
        assert_ne!(post("/v1/completions", &["{\"prompt\":\"a long one\"}"]), whole);
        assert_ne!(post("/a", &["b"]), post("/ab", &[""]));
        assert_ne!(of(key, &Method::PUT, "/a", &["b"]), post("/a", &["b"]));
        assert_ne!(
            of(PrintKey([1, 2, 3, 5]), &Method::POST, "/a", &["b"]),
            post("/a", &["b"]),
            "another key"
        );
    }
}
