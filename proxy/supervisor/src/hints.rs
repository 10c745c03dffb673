//! What a command and a backend's own words tell of how to talk to it.

use crate::spec::Command;

/// The first key that the command line or the environment gives llama-server: `/props` asks for one.
pub(crate) fn api_key(command: &Command) -> Option<String> {
    let keys = command
        .args
        .iter()
        .position(|arg| arg == "--api-key")
        .and_then(|at| command.args.get(at + 1))
        .cloned();
    let given = |name: &str| command.env.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone());
    let keys = keys.or_else(|| given("LLAMA_API_KEY")).or_else(|| std::env::var("LLAMA_API_KEY").ok())?;
    keys.split(',').next().map(str::to_owned).filter(|key| !key.is_empty())
}

/// Whether it tells its own counters.
pub(crate) fn tells_metrics(command: &Command) -> bool {
    const VARIABLE: &str = "LLAMA_ARG_ENDPOINT_METRICS";
    let given = command.env.iter().rfind(|(name, _)| name == VARIABLE).map(|(_, value)| value.clone());
    let inherited = || {
        let removed = command.env_remove.iter().any(|name| name == VARIABLE);
        std::env::var(VARIABLE).ok().filter(|_| !removed)
    };
    let on = |value: String| matches!(value.as_str(), "1" | "true" | "on" | "enabled");
    command.args.iter().any(|arg| arg == "--metrics") || given.or_else(inherited).is_some_and(on)
}

/// llama.cpp's build number in `b8827-3f545bec`. `b1` and below are builds from sources without history.
pub(crate) fn build_number(info: &str) -> Option<u32> {
    let digits = info.strip_prefix('b')?.split('-').next()?;
    digits.parse().ok().filter(|number| *number > 1)
}
