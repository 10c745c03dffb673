//! Identity of the server that began an answer, and which servers may continue it.

use warden_supervisor::AnswerIdentity;

/// Identity of the server that began an answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FirstServer {
    pub(super) kin: AnswerIdentity,
    pub(super) by_canary: bool,
}

impl FirstServer {
    /// A server that computes the rest must have the same command, binary and files.
    ///
    /// A canary differs from the model's normal build only in the binary, so the normal build may continue a
    /// canary's answer, too. It has the same vocabulary, renders the prompt itself, and continues exactly the
    /// client's text.
    pub(super) fn may_be_continued_by(self, next: Option<AnswerIdentity>) -> bool {
        let Some(next) = next else { return false };
        next == self.kin
            || self.by_canary
                && (next.but_for_binary, next.answer_tokens)
                    == (self.kin.but_for_binary, self.kin.answer_tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_canary_is_gone_on_with_by_another_binary_and_by_nothing_else() {
        let kin = |made_of, but_for_binary| AnswerIdentity { made_of, but_for_binary, answer_tokens: None };
        let begun = |by_canary| FirstServer { kin: kin(1, 7), by_canary };
        for by_canary in [false, true] {
            assert!(begun(by_canary).may_be_continued_by(Some(kin(1, 7))));
            assert!(
                !begun(by_canary).may_be_continued_by(Some(kin(2, 8))),
                "another model, or another context"
            );
            assert!(!begun(by_canary).may_be_continued_by(None));
            assert_eq!(begun(by_canary).may_be_continued_by(Some(kin(2, 7))), by_canary);
        }
        let shorter = AnswerIdentity { answer_tokens: Some(5), ..kin(2, 7) };
        assert!(!begun(true).may_be_continued_by(Some(shorter)));
    }
}
