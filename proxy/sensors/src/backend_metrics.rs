//! The numbers of llama-server's own `/metrics`, from its text. Pure: the request is somebody else's.

/// What llama-server counts since it started; `None` is "not told by this build".
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BackendMetrics {
    /// Prompt tokens evaluated.
    pub prompt_tokens: Option<u64>,
    /// Tokens generated.
    pub output_tokens: Option<u64>,
    /// Calls of `llama_decode`: the progress that a wedged server no longer makes.
    pub decodes: Option<u64>,
    /// Largest number of tokens in one sequence so far.
    pub largest_tokens: Option<u64>,
    /// Requests being worked on now.
    pub processing: Option<u64>,
    /// Requests that wait inside the server now.
    pub deferred: Option<u64>,
    /// Seconds spent on prompts.
    pub prompt_seconds: Option<f64>,
    /// Seconds spent generating.
    pub output_seconds: Option<f64>,
    /// Busy slots per decode, on average since the start.
    pub busy_slots_per_decode: Option<f64>,
    /// Tokens generated per second, on average since the last time that anybody asked.
    pub output_per_second: Option<f64>,
}

/// Reads the text. Lines that are not understood are passed over; a text without any known name gives all `None`.
pub fn parse(_text: &str) -> BackendMetrics {
    BackendMetrics::default()
}
