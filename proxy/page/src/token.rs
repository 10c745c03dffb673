//! The token in the page's forms, drawn when the program starts, so that a request forged by another site
//! lacks it. Each page has the token behind another random mask: pages are compressed, and the compressed
//! length of a repeated text could reveal it.

use subtle::ConstantTimeEq as _;

/// Length of a token in bytes: 128 bits cannot be guessed.
const TOKEN_BYTES: usize = 16;

/// The token of one instance. `Debug` hides it.
pub(crate) struct FormToken([u8; TOKEN_BYTES]);

impl std::fmt::Debug for FormToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FormToken(..)")
    }
}

impl FormToken {
    pub(crate) fn draw() -> Self {
        Self(rand::random())
    }

    /// Returns the token behind a random mask, for a page.
    pub(crate) fn masked(&self) -> String {
        let mask: [u8; TOKEN_BYTES] = rand::random();
        let hidden = self.0.iter().zip(mask).map(|(byte, mask)| byte ^ mask);
        hex::encode(mask.into_iter().chain(hidden).collect::<Vec<u8>>())
    }

    /// Returns whether a masked token is this one. Takes the same time for every wrong token.
    pub(crate) fn matches(&self, said: &str) -> bool {
        let mut both = [0; 2 * TOKEN_BYTES];
        if hex::decode_to_slice(said, &mut both).is_err() {
            return false;
        }
        let (mask, hidden) = both.split_at(TOKEN_BYTES);
        let plain: Vec<u8> = mask.iter().zip(hidden).map(|(mask, byte)| mask ^ byte).collect();
        self.0.as_slice().ct_eq(&plain).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_known_behind_every_mask_and_another_is_not() {
        let token = FormToken::draw();
        let (one, two) = (token.masked(), token.masked());
        assert!(one != two && token.matches(&one) && token.matches(&two), "{one} {two}");
        let mut wrong = one.clone();
        wrong.replace_range(0..1, if one.starts_with('0') { "1" } else { "0" });
        for said in
            [wrong.as_str(), "", &one[2..], &one[..62], &"0".repeat(64), "x", &FormToken::draw().masked()]
        {
            assert!(!token.matches(said), "{said}");
        }
        assert_eq!(format!("{token:?}"), "FormToken(..)");
    }
}
