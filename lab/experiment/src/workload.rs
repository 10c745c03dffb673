//! The workloads of an experiment, by name.

use serde::{Deserialize, Serialize};

/// Kind of work that is repeated on one fresh process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Workload {
    /// The same short prompt, with a short answer.
    ShortText,
    /// The same long prompt, with a short answer.
    LongText,
    /// Conversations that grow turn by turn, one per slot, all at the same time.
    Conversation,
    /// The same image with a different text each time, so that the image is evaluated each time.
    SameImage,
    /// Images of different sizes.
    ImageSizes,
    /// A short audio clip.
    Audio,
    /// Answers of 1, 16, 64 and 256 tokens.
    OutputLengths,
    /// A new prompt each time.
    DistinctPrompts,
    /// Prompts of many lengths, up to the context size.
    PrefillSweep,
    /// Embeddings of texts.
    Embeddings,
}

impl Workload {
    /// All workloads, in running order.
    pub const ALL: [Self; 10] = [
        Self::ShortText,
        Self::LongText,
        Self::OutputLengths,
        Self::DistinctPrompts,
        Self::Conversation,
        Self::PrefillSweep,
        Self::SameImage,
        Self::ImageSizes,
        Self::Audio,
        Self::Embeddings,
    ];

    /// Returns the name used on the command line, in tables and in JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ShortText => "short-text",
            Self::LongText => "long-text",
            Self::Conversation => "conversation",
            Self::SameImage => "same-image",
            Self::ImageSizes => "image-sizes",
            Self::Audio => "audio",
            Self::OutputLengths => "output-lengths",
            Self::DistinctPrompts => "distinct-prompts",
            Self::PrefillSweep => "prefill-sweep",
            Self::Embeddings => "embeddings",
        }
    }

    /// Returns a short description for lists.
    pub const fn description(self) -> &'static str {
        match self {
            Self::ShortText => "the same short prompt again and again",
            Self::LongText => "the same long prompt again and again",
            Self::Conversation => "conversations that grow, one on each slot",
            Self::SameImage => "one image again and again",
            Self::ImageSizes => "images of different sizes",
            Self::Audio => "a short audio clip",
            Self::OutputLengths => "answers of 1, 16, 64 and 256 tokens",
            Self::DistinctPrompts => "prompts that were never sent before",
            Self::PrefillSweep => "prompts of many lengths, up to the context",
            Self::Embeddings => "embeddings of texts",
        }
    }
}

impl std::fmt::Display for Workload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.as_str())
    }
}

/// Text that names no workload.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no workload: they are {all}", all = Workload::ALL.map(Workload::as_str).join(", "))]
pub struct WorkloadError(String);

impl std::str::FromStr for Workload {
    type Err = WorkloadError;

    fn from_str(text: &str) -> Result<Self, WorkloadError> {
        let found = Self::ALL.into_iter().find(|workload| workload.as_str() == text);
        found.ok_or_else(|| WorkloadError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_the_error_for_an_unknown_one() {
        let names =
            Workload::ALL.map(|workload| format!("{workload:<16} {}", workload.description())).join("\n");
        let unknown = "poems".parse::<Workload>().unwrap_err();
        insta::assert_snapshot!(format!("{names}\n{unknown}"));
    }
}
