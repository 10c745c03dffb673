//! Where the bodies of a route have what rules are about.

/// Where a request body has what rules are about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// `messages`; generates.
    Chat,
    /// `prompt`, in llama-server's own dialect; generates.
    Native,
    /// `prompt`, as OpenAI has it; generates.
    Completion,
    /// `instructions` and `input`; generates.
    Responses,
    /// `system` and `messages`; generates.
    Messages,
    /// As [`Self::Chat`], and nothing is generated.
    ChatCount,
    /// As [`Self::Responses`], and nothing is generated.
    ResponsesCount,
    /// As [`Self::Messages`], and nothing is generated.
    MessagesCount,
}

impl Shape {
    /// Whether the route generates text.
    pub(crate) fn generates(self) -> bool {
        matches!(self, Self::Chat | Self::Native | Self::Completion | Self::Responses | Self::Messages)
    }

    /// Whether the route takes a seed. That of messages passes none on.
    pub(crate) fn takes_seeds(self) -> bool {
        self.generates() && self != Self::Messages
    }

    /// The list of messages, and the member that holds a system prompt.
    pub(crate) fn prompts(self) -> (Option<&'static str>, Option<&'static str>) {
        match self {
            Self::Chat | Self::ChatCount => (Some("messages"), None),
            Self::Responses | Self::ResponsesCount => (Some("input"), Some("instructions")),
            Self::Messages | Self::MessagesCount => (Some("messages"), Some("system")),
            Self::Native | Self::Completion => (None, None),
        }
    }

    /// The bounds that the route looks at, its own name of it first.
    pub(crate) fn bounds(self) -> &'static [&'static str] {
        match self {
            Self::Native => &["n_predict", "max_tokens", "max_completion_tokens"],
            Self::Responses => &["max_output_tokens", "max_tokens", "max_completion_tokens", "n_predict"],
            Self::Messages => &["max_tokens"],
            _ => &["max_tokens", "max_completion_tokens", "n_predict"],
        }
    }
}
