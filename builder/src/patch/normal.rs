//! The text of a container without comments and layout, and its hash.

/// What is hashed, in the words that stand in every `fingerprints.json`.
pub const NORMALISATION: &str =
    "strip // and /* */ comments, collapse white space, sha256[:16] of header..closing brace";
