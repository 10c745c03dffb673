//! Identity of a series, and the name of its file. Pure.

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use warden_policies::{MemoryKind, ModelName};

/// Identity of a series.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SeriesKey {
    /// Name of the model.
    pub model: ModelName,
    /// Number of the replica.
    pub replica: u32,
    /// Kind of memory.
    pub memory: MemoryKind,
}

pub(super) const FILE_SUFFIX: &str = ".series";

/// Limits the letters of the model's name in the file name.
const SHOWN_LETTERS: usize = 40;

impl SeriesKey {
    /// Returns the readable part of the model's name, and a hash of the whole name: every name gives a valid
    /// file name, and no two models share a file.
    pub(super) fn file_name(&self) -> String {
        let plain = |letter: char| if letter.is_ascii_alphanumeric() || letter == '.' { letter } else { '-' };
        let shown: String = self.model.as_str().chars().map(plain).take(SHOWN_LETTERS).collect();
        let whole = format!("{}\0{}\0{}", self.model, self.replica, self.memory);
        let hash = Sha256::digest(whole.as_bytes());
        // With `m-` the file is visible even if the model's name begins with a dot.
        format!("m-{shown}-{}-{}-{}{FILE_SUFFIX}", self.replica, self.memory, hex::encode(&hash[..8]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_name_of_a_model_makes_a_name_of_a_file() {
        let file = |model: &str, replica| {
            SeriesKey { model: ModelName::new(model), replica, memory: MemoryKind::Host }.file_name()
        };
        insta::assert_snapshot!(file("org/Qwen 3.gguf:q4", 1));
        let long = "x".repeat(5000);
        for name in ["../../etc/passwd", "a\nb", "ü", "", ".", long.as_str(), "\0"] {
            let file = file(name, 0);
            let plain = |letter: char| letter.is_ascii_alphanumeric() || "-.".contains(letter);
            assert!(file.chars().all(plain) && file.len() < 100 && file.starts_with("m-"), "{file}");
        }
        assert_ne!(file("a/b", 0), file("a-b", 0));
        assert_ne!(file("a", 0), file("a", 1));
    }
}
