//! Deserializes values that may be one text or a list of texts.

use serde::{Deserialize, Deserializer};

/// Deserializes a single text as a list of one.
pub(crate) fn one_or_several<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Written {
        One(String),
        Several(Vec<String>),
    }
    Ok(match Written::deserialize(deserializer)? {
        Written::One(one) => vec![one],
        Written::Several(several) => several,
    })
}
