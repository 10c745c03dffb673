//! Build ids.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Hexadecimal digits of an id: 64 bits, enough that a million builds do not collide.
const ID_DIGITS: usize = 16;

/// Id of a build: 16 lower-case hexadecimal digits of its recipe's hash.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct BuildId(String);

impl BuildId {
    pub(crate) fn from_hash(hash: &[u8; 32]) -> Self {
        Self(hex::encode(&hash[..ID_DIGITS / 2]))
    }

    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Error for a text that is no build id.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not the id of a build: that has 16 hexadecimal digits")]
pub struct BuildIdError(String);

impl FromStr for BuildId {
    type Err = BuildIdError;

    fn from_str(text: &str) -> Result<Self, BuildIdError> {
        let digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        if text.len() == ID_DIGITS && text.bytes().all(digit) {
            Ok(Self(text.to_owned()))
        } else {
            Err(BuildIdError(text.to_owned()))
        }
    }
}

impl TryFrom<String> for BuildId {
    type Error = BuildIdError;

    fn try_from(text: String) -> Result<Self, BuildIdError> {
        text.parse()
    }
}

impl From<BuildId> for String {
    fn from(id: BuildId) -> Self {
        id.0
    }
}

impl fmt::Display for BuildId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not `write_str`, which ignores the padding of tables.
        self.0.fmt(f)
    }
}
