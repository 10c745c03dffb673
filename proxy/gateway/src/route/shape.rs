//! Shapes of request bodies: the members to which request rules apply.

/// Shape of a request body for request rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodyShape {
    /// Chat with `messages`; generates.
    Chat,
    /// `prompt`, in llama-server's own dialect; generates.
    Native,
    /// `prompt`, in OpenAI's dialect; generates.
    Completion,
    /// `instructions` and `input`; generates.
    Responses,
    /// `system` and `messages`; generates.
    Messages,
    /// Same members as [`Self::Chat`], on a route that only counts tokens.
    ChatCount,
    /// Same members as [`Self::Responses`], on a route that only counts tokens.
    ResponsesCount,
    /// Same members as [`Self::Messages`], on a route that only counts tokens.
    MessagesCount,
}

impl BodyShape {
    /// Returns whether the route generates text.
    pub(crate) fn generates(self) -> bool {
        matches!(self, Self::Chat | Self::Native | Self::Completion | Self::Responses | Self::Messages)
    }

    /// Returns whether the route accepts a seed. llama-server's messages route ignores a seed.
    pub(crate) fn takes_seeds(self) -> bool {
        self.generates() && self != Self::Messages
    }

    /// Returns the names of two members, if the shape has them: the list of messages, and the system prompt.
    pub(crate) fn prompt_members(self) -> (Option<&'static str>, Option<&'static str>) {
        match self {
            Self::Chat | Self::ChatCount => (Some("messages"), None),
            Self::Responses | Self::ResponsesCount => (Some("input"), Some("instructions")),
            Self::Messages | Self::MessagesCount => (Some("messages"), Some("system")),
            Self::Native | Self::Completion => (None, None),
        }
    }

    /// Returns the names of the token limit that the route reads, its native name first.
    pub(crate) fn limit_members(self) -> &'static [&'static str] {
        match self {
            Self::Native => &["n_predict", "max_tokens", "max_completion_tokens"],
            Self::Responses => &["max_output_tokens", "max_tokens", "max_completion_tokens", "n_predict"],
            Self::Messages => &["max_tokens"],
            _ => &["max_tokens", "max_completion_tokens", "n_predict"],
        }
    }
}
