//! The stored form of a key: its SHA-256. `Debug` does not show it, and comparisons take constant time.

use std::fmt;
use std::hash::{Hash, Hasher};

use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

/// SHA-256 of a key. Keys are long and random, so a hash without salt cannot be inverted.
#[derive(Clone, Copy)]
pub struct KeyHash([u8; 32]);

impl KeyHash {
    /// Hashes a key in clear text.
    pub fn from_key(key: &[u8]) -> Self {
        Self(Sha256::digest(key).into())
    }

    /// Parses 64 hexadecimal digits.
    pub fn from_hex(text: &str) -> Option<Self> {
        let mut hash = [0; 32];
        hex::decode_to_slice(text, &mut hash).ok()?;
        Some(Self(hash))
    }

    /// Formats the hash as 64 hexadecimal digits, for the key file.
    pub fn to_hex(self) -> String {
        hex::encode(self.0)
    }
}

impl PartialEq for KeyHash {
    fn eq(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl Eq for KeyHash {}

impl Hash for KeyHash {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write(&self.0);
    }
}

impl fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyHash(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_is_sha_256_and_does_not_show_itself() {
        // FIPS 180-2, appendix B.1.
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let hash = KeyHash::from_key(b"abc");
        assert_eq!((hash.to_hex().as_str(), Some(hash)), (abc, KeyHash::from_hex(abc)));
        assert_eq!(format!("{hash:?}"), "KeyHash(..)");
        assert!(hash == KeyHash::from_key(b"abc") && hash != KeyHash::from_key(b"abd"));
        assert!(
            ["", "ba78", &abc[1..], &abc.replace('b', "g")].iter().all(|t| KeyHash::from_hex(t).is_none())
        );
    }
}
