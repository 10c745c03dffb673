//! Lists the GPUs that a server sees.

use std::path::Path;
use std::process::Stdio;

use tokio::process::Command;
use tokio_util::sync::CancellationToken;

use super::server::set_environment;
use super::trial::TrialSettings;
use crate::error::{BuilderError, Result};
use crate::process::{ChildExit, output};

/// Line before the list in the server's output.
const DEVICE_LIST_HEADING: &str = "Available devices:";

/// Output of `--list-devices`, one entry per device, such as `CUDA0: NVIDIA H200 (143167 MiB, 142540 MiB
/// free)`. The list is empty for older servers without this flag, and for a server that cannot start, which
/// the checks report.
pub(super) async fn list_devices(
    binary: &Path,
    trial: &TrialSettings,
    cancel: &CancellationToken,
) -> Result<Vec<String>> {
    let mut command = Command::new(binary);
    command.arg("--list-devices").stdin(Stdio::null());
    set_environment(&mut command, trial);
    match tokio::time::timeout(trial.timeout, output(command, cancel)).await {
        Ok(Ok((ChildExit::Cancelled, _))) => Err(BuilderError::Cancelled),
        Ok(Ok((ChildExit::Exited(status), text))) if status.success() => Ok(parse_entries(&text)),
        _ => Ok(Vec::new()),
    }
}

fn parse_entries(text: &str) -> Vec<String> {
    let after = text.lines().skip_while(|line| line.trim() != DEVICE_LIST_HEADING).skip(1);
    // List entries are indented, later lines are not.
    after.take_while(|line| line.starts_with("  ")).map(|line| line.trim().to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_what_is_indented_below_its_heading() {
        let text = "ggml_cuda_init: found 1 CUDA devices:\n  Device 0: X, compute capability 9.0\n\
                    Available devices:\n  CUDA0: X (2 MiB, 1 MiB free)\n  CUDA1: Y (3 MiB, 2 MiB free)\nbye\n  no";
        assert_eq!(parse_entries(text), ["CUDA0: X (2 MiB, 1 MiB free)", "CUDA1: Y (3 MiB, 2 MiB free)"]);
        assert_eq!(parse_entries("Available devices:\n"), Vec::<String>::new());
        assert_eq!(parse_entries("unknown flag\n  see --help"), Vec::<String>::new());
    }
}
