//! Why the VRAM of a backend is not known: sentences for status, logs and `docs/sensors.md`.

use serde::{Serialize, Serializer};

/// A reason. Its text is a sentence's second half: "the VRAM policy is off because …".
#[derive(Clone, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum Why {
    /// No device was found.
    #[error("no GPU is visible here")]
    NoDevice,
}

impl Why {
    /// The whole sentence.
    pub fn sentence(&self) -> String {
        format!("the VRAM policy is off because {self}")
    }
}

impl Serialize for Why {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
