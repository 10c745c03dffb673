//! What may be written as one text or as a list of texts. Pure.

use serde::{Deserialize, Deserializer};

/// Reads a text as a list of one.
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
