//! The formats in which llama-server writes generated answers.

use crate::route::BodyShape;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AnswerFormat {
    Chat,
    Text,
    /// llama-server's own `/completion`.
    Native,
    Responses,
    Messages,
}

impl AnswerFormat {
    pub(crate) fn from_shape(shape: BodyShape) -> Option<Self> {
        Some(match shape {
            BodyShape::Chat => Self::Chat,
            BodyShape::Completion => Self::Text,
            BodyShape::Native => Self::Native,
            BodyShape::Responses => Self::Responses,
            BodyShape::Messages => Self::Messages,
            BodyShape::ChatCount | BodyShape::ResponsesCount | BodyShape::MessagesCount => return None,
        })
    }
}
