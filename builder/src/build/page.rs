//! Makes the web page with npm before compilation, within a time limit. A failure never fails the build.
//!
//! cmake would run npm itself during compilation, without a time limit; it uses a finished `tools/ui/dist` as
//! it is. For a build without a page, an empty page replaces the files missing from `tools/ui`.

use std::path::Path;

use tokio::time::{Instant, sleep_until};

use super::making::RunningBuild;
use crate::error::{BuilderError, Result, check_cancelled, io_error};
use crate::event::{BuildEvent, BuildPhase};
use crate::process::{ChildExit, run};

/// Path of the finished page, relative to `tools/ui`, where cmake looks for it.
const PAGE_PATH: &str = "dist/index.html";
const MAX_QUOTED_CHARS: usize = 200;

/// `CMakeLists.txt` of a library without a page, used where the page's own sources are incomplete.
const EMPTY_PAGE_CMAKE: &str = "# llama-warden: stands in for what is missing here. A server without a web page.\n\
    add_library(llama-ui INTERFACE)\n\
    target_include_directories(llama-ui INTERFACE ${CMAKE_CURRENT_SOURCE_DIR})\n";
/// Header of a library without a page. An empty list suffices: the server names files only under `#if`.
const EMPTY_PAGE_HEADER: &str = "// llama-warden: stands in for what is missing here. A server without a web page.\n\
    #pragma once\n\n#include <array>\n#include <cstddef>\n#include <string>\n\n\
    struct llama_ui_asset {\n    std::string           name;\n    const unsigned char * data;\n    \
    std::size_t           size;\n    std::string           etag;\n    std::string           type;\n};\n\n\
    inline const std::array<llama_ui_asset, 0> & llama_ui_get_assets() {\n    \
    static const std::array<llama_ui_asset, 0> none{};\n    return none;\n}\n";

impl RunningBuild<'_> {
    /// Creates the files that a build without a page needs and the source lacks, if the plan demands it.
    pub(super) fn write_empty_page(&self) -> Result<()> {
        if !self.plan.extras.stand_in {
            return Ok(());
        }
        let folder = self.work.source().join("tools/ui");
        std::fs::create_dir_all(&folder).map_err(io_error("creating", &folder))?;
        for (name, text) in [("CMakeLists.txt", EMPTY_PAGE_CMAKE), ("ui.h", EMPTY_PAGE_HEADER)] {
            let path = folder.join(name);
            std::fs::write(&path, text).map_err(io_error("writing", &path))?;
        }
        Ok(())
    }

    /// Makes the page with npm. The inner error is the reason why there is no page.
    pub(super) async fn make_page(&mut self) -> Result<std::result::Result<(), String>> {
        self.report(BuildEvent::Phase(BuildPhase::Page));
        let Some(npm) = self.builder.env.find("npm") else {
            return Ok(Err("npm is not here any more".into()));
        };
        let until = Instant::now() + self.request.page_timeout;
        for arguments in [&["ci"][..], &["run", "build"]] {
            if let Err(why) = self.run_npm(&npm, arguments, until).await? {
                return Ok(Err(format!("`npm {}` {why}", arguments.join(" "))));
            }
        }
        let made = self.work.source().join("tools/ui").join(PAGE_PATH).is_file();
        Ok(if made { Ok(()) } else { Err(format!("npm ended well and left no {PAGE_PATH}")) })
    }

    async fn run_npm(
        &mut self,
        npm: &Path,
        arguments: &[&str],
        until: Instant,
    ) -> Result<std::result::Result<(), String>> {
        let folder = self.work.source().join("tools/ui");
        let number = self.plan.source.revision.build_number.unwrap_or(0).to_string();
        let mut command = self.command(npm, &folder);
        command
            .args(arguments)
            .env("LLAMA_UI_OUT_DIR", folder.join("dist"))
            .env("LLAMA_UI_VERSION", format!("b{number}"))
            .env("LLAMA_BUILD_NUMBER", number)
            // npm must give up soon without a network, and must not ask questions or print advertisements.
            .envs([
                ("CI", "true"),
                ("npm_config_fetch_retries", "1"),
                ("npm_config_fetch_timeout", "60000"),
                ("npm_config_audit", "false"),
                ("npm_config_fund", "false"),
                ("npm_config_update_notifier", "false"),
            ]);
        let shown = format!("{:?}", command.as_std());
        self.log.begin_phase(&shown);
        let cancel = self.builder.cancel.child_token();
        let mut last = String::new();
        let mut late = false;
        let ended = {
            let log = &mut self.log;
            let work = run(command, &cancel, |line| {
                log.push_line(line);
                // Keep npm's first error line; without one, its last line.
                if !line.trim().is_empty() && !is_error(&last) {
                    line.trim().clone_into(&mut last);
                }
            });
            tokio::pin!(work);
            tokio::select! {
                ended = &mut work => ended,
                () = sleep_until(until) => {
                    late = true;
                    cancel.cancel();
                    work.await
                }
            }
        };
        self.log.end_phase();
        check_cancelled(&self.builder.cancel)?;
        let said = last.chars().take(MAX_QUOTED_CHARS).collect::<String>();
        Ok(match ended {
            Ok(ChildExit::Exited(status)) if status.success() => Ok(()),
            _ if late => {
                Err(format!("was not done within {:?} (build.page_timeout)", self.request.page_timeout))
            }
            Ok(ChildExit::Exited(status)) => Err(format!("ended with {status}: {said}")),
            Ok(ChildExit::Cancelled) => return Err(BuilderError::Cancelled),
            Err(error) => Err(format!("cannot be run: {error}")),
        })
    }
}

fn is_error(line: &str) -> bool {
    let line = line.to_ascii_lowercase();
    line.starts_with("npm error") || line.starts_with("npm err!")
}
