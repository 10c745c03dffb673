//! The views of the page, and the mapping from paths to them. Pure.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageView {
    Overview,
    Memory,
    Requests,
    Events,
    Logs,
    Configuration,
    Builds,
    Help,
}

impl PageView {
    pub(crate) const LISTED: [Self; 7] = [
        Self::Overview,
        Self::Memory,
        Self::Requests,
        Self::Events,
        Self::Logs,
        Self::Configuration,
        Self::Builds,
    ];

    pub(crate) const fn path(self) -> &'static str {
        match self {
            Self::Overview => "/page/",
            Self::Memory => "/page/memory",
            Self::Requests => "/page/requests",
            Self::Events => "/page/events",
            Self::Logs => "/page/logs",
            Self::Configuration => "/page/configuration",
            Self::Builds => "/page/builds",
            Self::Help => "/page/help",
        }
    }

    pub(crate) const fn title(self) -> &'static str {
        match self {
            Self::Overview => "Overview",
            Self::Memory => "Memory",
            Self::Requests => "Requests",
            Self::Events => "Events",
            Self::Logs => "Logs",
            Self::Configuration => "Configuration",
            Self::Builds => "Builds",
            Self::Help => "Keys and words",
        }
    }

    /// Returns the name of the view for scripts and styles.
    pub(crate) fn word(self) -> &'static str {
        self.path().trim_start_matches("/page/")
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageRoute<'a> {
    Root,
    View(PageView),
    Live,
    Act,
    Cancel,
    /// A compiled-in file.
    File(&'a str),
    Nothing,
}

impl PageRoute<'_> {
    /// Returns whether the answer is a whole document, which any site may open in a tab.
    pub(crate) const fn is_document(self) -> bool {
        matches!(self, Self::Root | Self::View(_) | Self::Nothing)
    }
}

/// Maps a path to its route; `None` if the path does not belong to the page.
pub(crate) fn parse_path(path: &str) -> Option<PageRoute<'_>> {
    let rest = match path {
        "/" | "/page" => return Some(PageRoute::Root),
        _ => path.strip_prefix("/page/")?,
    };
    let listed = PageView::LISTED.into_iter().chain([PageView::Help]).find(|view| view.path() == path);
    Some(match (listed, rest) {
        (Some(view), _) => PageRoute::View(view),
        (None, "memory.html") => PageRoute::View(PageView::Memory),
        (None, "live") => PageRoute::Live,
        (None, "act") => PageRoute::Act,
        (None, "cancel") => PageRoute::Cancel,
        (None, rest) => match rest.split_once('/') {
            Some(("files", name)) => PageRoute::File(name),
            _ => PageRoute::Nothing,
        },
    })
}

pub(crate) fn is_page_address(address: &str) -> bool {
    address.starts_with("/page/") && address.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'\\')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_view_has_a_path_of_its_own_and_other_routes_are_not_ours() {
        for view in PageView::LISTED.into_iter().chain([PageView::Help]) {
            assert_eq!(parse_path(view.path()), Some(PageRoute::View(view)));
        }
        assert_eq!((parse_path("/"), parse_path("/page")), (Some(PageRoute::Root), Some(PageRoute::Root)));
        assert_eq!(parse_path("/page/files/a.css"), Some(PageRoute::File("a.css")));
        assert_eq!(
            (parse_path("/page/live"), parse_path("/page/act")),
            (Some(PageRoute::Live), Some(PageRoute::Act))
        );
        assert_eq!(parse_path("/page/nothing"), Some(PageRoute::Nothing));
        for other in ["/status", "/pages", "/models/page/logs", "", "/metrics"] {
            assert_eq!(parse_path(other), None, "{other}");
        }
    }
}
