const button = this, text = button.parentElement.querySelector('pre');
const done = () => {
  button.textContent = 'Copied';
  setTimeout(() => {button.textContent = 'Copy'}, 1500);
};
/* Without permission for the clipboard the text is selected: Ctrl+C is left to the user. */
const select = () => {
  window.getSelection().selectAllChildren(text);
  button.textContent = 'Press Ctrl+C';
};
if (navigator.clipboard) {
  navigator.clipboard.writeText(text.textContent).then(done, select);
} else {
  select();
}
